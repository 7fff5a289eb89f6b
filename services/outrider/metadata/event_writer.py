"""Writes events without anybody waiting: callers hand one over, a task of its own puts it on the stream.

What happens to many requests in one moment becomes one event with a count, so that a worker with a thousand requests
does not push everything else off the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from outrider.metadata.events import EventKind, FieldValue
from outrider.supervision import beside

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
    """Owned by one event loop."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._pending: dict[tuple[object, ...], _Pending] = {}
        self._filled = asyncio.Event()
        self.num_dropped = 0
        """Events that came faster than the store took them."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EventWriter]:
        """Writes until the block is left, and then what was said last, such as why this process leaves."""
        try:
            async with beside(self._run(), "events writer"):
                yield self
        finally:
            # The store bounds the time that it takes.
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

    async def _run(self) -> NoReturn:
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
