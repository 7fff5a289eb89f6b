"""Writes events without anybody waiting: callers hand one over, a task of its own puts it on the stream.

What happens to many requests in one moment becomes one event with a count, so that a worker with a thousand requests
does not push everything else off the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from outrider.metadata.events import EventKind, FieldValue

log = logging.getLogger(__name__)

_MAX_PENDING = 256


class EventStream(Protocol):
    """The part of the metadata store that takes events. Does not raise where the store is away."""

    async def emit(self, kind: str, fields: Mapping[str, FieldValue]) -> None: ...


@dataclass(slots=True)
class _Pending:
    fields: dict[str, FieldValue]
    count: int = 1


class EventWriter:
    """Owned by one event loop. `async with` it."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._pending: dict[tuple[object, ...], _Pending] = {}
        self._filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.num_dropped = 0
        """Events that came faster than the store took them."""

    async def __aenter__(self) -> EventWriter:
        self._task = asyncio.create_task(self._run(), name="events writer")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        # What was said last, such as why this process leaves. The store bounds the time that it takes.
        while self._pending:
            await self._write_next()

    def emit(self, kind: EventKind, fields: Mapping[str, FieldValue], *, request_id: str = "") -> None:
        """Never waits and never raises. Equal events that wait together become one, with their `count`, and with the
        first one's `request_id`."""
        key = (kind, *sorted(fields.items()))
        if (known := self._pending.get(key)) is not None:
            known.count += 1
        elif len(self._pending) >= _MAX_PENDING:
            # The store is slow. Events are for people; nothing waits for them.
            self.num_dropped += 1
            log.warning("events come faster than the metadata store takes them: some are lost")
        else:
            self._pending[key] = _Pending({**fields, **({"request_id": request_id} if request_id else {})})
            self._filled.set()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            await self._write_next()
            if not self._pending:
                self._filled.clear()

    async def _write_next(self) -> None:
        key, pending = next(iter(self._pending.items()))
        del self._pending[key]
        count = {"count": pending.count} if pending.count > 1 else {}
        try:
            await self._stream.emit(str(key[0]), {**pending.fields, **count})
        except Exception:
            # The next ones are written all the same.
            log.exception("event %s not written", key[0])
