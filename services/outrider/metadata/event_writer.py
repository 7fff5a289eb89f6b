"""Writes events in the background: callers hand them over, and a task adds them to the stream.

Equal events of many requests at one time become one event with a count. Else a worker with a thousand requests would
push all other events off the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from outrider.metadata.events import EventKind, FieldValue
from outrider.runtime.supervision import background

log = logging.getLogger(__name__)

_MAX_PENDING = 256


class EventStream(Protocol):
    """The part of the metadata store that takes events. Does not raise while the store is unreachable."""

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
        """Events dropped because the store was too slow."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EventWriter]:
        """Writes until the block is left, then the last events, such as why this process stops."""
        try:
            async with background(self._run(), "events writer"):
                yield self
        finally:
            # This ends: the store limits the time of each write.
            while self._pending:
                await self._write_next()

    def emit(self, kind: EventKind, fields: Mapping[str, FieldValue], *, request_id: str = "") -> None:
        """Never waits and never raises. Equal pending events become one with a `count` and the first one's
        `request_id`."""
        key = (kind, *sorted(fields.items()))
        if (known := self._pending.get(key)) is not None:
            known.count += 1
        elif len(self._pending) >= _MAX_PENDING:
            # The store is slow. Events are for people, so nothing waits for them.
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
            # Continue with the next ones.
            log.exception("event %s not written", key[0])
