"""The fleet over time: what one read of the leases shows that the one before did not, as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from outrider.metadata import LeaseRecord
from outrider.metadata.directory import Key
from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind
from outrider.metadata.keys import role_name
from outrider.metadata.lease import HEARTBEAT_S
from outrider.supervision import Backoff, keep_running

log = logging.getLogger(__name__)


class Leases(Protocol):
    """The part of the metadata store that names workers."""

    @property
    def available(self) -> bool: ...

    @property
    def given_back(self) -> frozenset[Key]: ...

    async def workers(self) -> list[LeaseRecord]: ...


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that happened to a worker."""

    kind: EventKind
    worker: LeaseRecord
    reason: str = ""

    def tell(self, events: EventWriter) -> None:
        info = self.worker.info
        fields = {"worker_id": info.worker_id, "role": role_name(info.role), "address": self.worker.address}
        more = {"model": info.model, "reason": self.reason}
        events.emit(self.kind, {**fields, **{name: value for name, value in more.items() if value}})


def changes(
    before: Mapping[Key, LeaseRecord], now: Mapping[Key, LeaseRecord], given_back: frozenset[Key]
) -> Iterator[Change]:
    """From one read of the leases to the next."""
    for key, record in now.items():
        if key not in before:
            yield Change(EventKind.WORKER_JOINED, record)
    for key, record in before.items():
        if key not in now:
            left = key in given_back or record.load.draining
            yield Change(EventKind.WORKER_LEFT if left else EventKind.WORKER_LOST, record)


def by_key(records: Sequence[LeaseRecord]) -> dict[Key, LeaseRecord]:
    return {record.key: record for record in records}


class FleetWatch:
    """Reads the leases every second. What was there at the first read is no news."""

    def __init__(self, leases: Leases, events: EventWriter, pause_s: float = HEARTBEAT_S) -> None:
        self._leases = leases
        self._events = events
        self._pause_s = pause_s
        self._known: dict[Key, LeaseRecord] | None = None

    async def run(self) -> NoReturn:
        await keep_running(self._look_and_rest, Backoff(self._pause_s, self._pause_s), _failed)

    async def look(self) -> None:
        now = by_key(await self._leases.workers())
        if not self._leases.available:
            # The list is the last known one: who is missing from it later may have been there all the time.
            return
        if self._known is not None:
            for change in changes(self._known, now, self._leases.given_back):
                change.tell(self._events)
        self._known = now

    async def _look_and_rest(self) -> None:
        await self.look()
        await asyncio.sleep(self._pause_s)


def _failed(error: Exception) -> None:
    log.error("watching the fleet failed", exc_info=error)
