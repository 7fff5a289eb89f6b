"""Changes of the fleet, from one read of the leases to the next, as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from outrider.metadata import LeaseRecord, MetadataStore
from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import MAX_EVENTS, EventKind
from outrider.metadata.keys import role_name
from outrider.metadata.workers.cordons import CordonStore
from outrider.metadata.workers.directory import Key
from outrider.metadata.workers.lease import HEARTBEAT_S
from outrider.protocol.pairs import unpaired
from outrider.runtime.supervision import Backoff, keep_running

log = logging.getLogger(__name__)

_LOST = "it died, hangs, or is cut off: its lease was not renewed"
SETTLE_MS = 3000
"""Time after a cordon until every router knows it, and the workers' reports include all that was sent before."""


@dataclass(frozen=True, slots=True)
class FleetChange:
    kind: EventKind
    worker: LeaseRecord
    reason: str = ""
    by: str = ""
    grace_s: int | None = None
    """Set if the worker is drained: seconds that its sequences may take."""

    def tell(self, events: EventWriter) -> None:
        info = self.worker.info
        fields = {"worker_id": info.worker_id, "role": role_name(info.role), "address": self.worker.address}
        more = {"model": info.model, "reason": self.reason, "by": self.by}
        grace = {} if self.grace_s is None else {"grace_s": self.grace_s}
        events.emit(self.kind, {**fields, **{name: value for name, value in more.items() if value}, **grace})


def changes(
    before: Mapping[Key, LeaseRecord], now: Mapping[Key, LeaseRecord], given_back: frozenset[Key]
) -> Iterator[FleetChange]:
    """The changes from one read of the leases to the next."""
    for key, record in now.items():
        if key not in before:
            yield FleetChange(EventKind.WORKER_JOINED, record)
    for key, record in before.items():
        if key not in now:
            if key in given_back or record.load.draining:
                yield FleetChange(EventKind.WORKER_LEFT, record)
            else:
                yield FleetChange(EventKind.WORKER_LOST, record, _LOST)


def by_key(records: Sequence[LeaseRecord]) -> dict[Key, LeaseRecord]:
    return {record.key: record for record in records}


def is_drained(record: LeaseRecord, now_unix_ms: int) -> bool:
    """Whether a worker that an operator drains has become idle, and this has not been reported yet."""
    cordon = record.cordon
    if cordon is None or not cordon.hand_over_unix_ms or cordon.drained_unix_ms:
        return False
    load = record.load
    idle = not (load.num_running or load.num_waiting or load.num_sequences)
    return idle and now_unix_ms - cordon.since_unix_ms - record.age_ms >= SETTLE_MS


class FleetWatch:
    """Reads the leases every second and writes the changes as events, each joining once. Of several control planes only
    the leader writes."""

    def __init__(
        self,
        leases: MetadataStore,
        cordons: CordonStore,
        events: EventWriter,
        leads: Callable[[], bool] = lambda: True,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._leases = leases
        self._cordons = cordons
        self._events = events
        self._leads = leads
        self._wall_clock = wall_clock
        self._known: dict[Key, LeaseRecord] | None = None
        self._refused: Mapping[Key, str] = {}
        self._unpaired: dict[str, str] = {}
        """Drafts that no target can use, as far as an event was written."""

    async def run(self) -> NoReturn:
        await keep_running(self._look_and_sleep, Backoff(HEARTBEAT_S, HEARTBEAT_S), _failed)

    async def look(self) -> None:
        now = by_key(await self._leases.workers())
        if not self._leases.available:
            # The list is the last known one and may be old, so no change can be derived from it.
            return
        before, self._known = self._known, now
        if not self._leads():
            return
        if before is None:
            before = await self._announced(now)
        for change in changes(before, now, self._leases.given_back):
            change.tell(self._events)
        self._tell_refused()
        self._tell_unpaired(now)
        now_ms = round(self._wall_clock() * 1000)
        for record in now.values():
            if record.cordon is not None and is_drained(record, now_ms):
                await self._cordons.mark_drained(record.cordon, now_ms)
                FleetChange(EventKind.WORKER_DRAINED, record, record.cordon.reason, record.cordon.by).tell(self._events)

    async def _announced(self, now: Mapping[Key, LeaseRecord]) -> dict[Key, LeaseRecord]:
        """Of the workers that were there first, those for which an earlier control plane wrote that they joined."""
        last = await self._leases.last_events(MAX_EVENTS)
        announced = {event.fields.get("worker_id") for event in last if event.kind == EventKind.WORKER_JOINED}
        return {key: record for key, record in now.items() if record.info.worker_id in announced}

    def _tell_refused(self) -> None:
        known, self._refused = self._refused, self._leases.refused
        for key in self._refused.keys() - known.keys():
            fields = {"worker_id": key[1], "role": role_name(key[0]), "reason": self._refused[key]}
            self._events.emit(EventKind.LEASE_REFUSED, fields)

    def _tell_unpaired(self, now: Mapping[Key, LeaseRecord]) -> None:
        """Also those that this control plane found when it came to lead."""
        known, self._unpaired = self._unpaired, unpaired(record.info for record in now.values())
        for record in now.values():
            if (reason := self._unpaired.get(record.info.worker_id)) and record.info.worker_id not in known:
                FleetChange(EventKind.DRAFT_UNPAIRED, record, reason).tell(self._events)

    async def _look_and_sleep(self) -> None:
        await self.look()
        await asyncio.sleep(HEARTBEAT_S)


def _failed(error: Exception) -> None:
    log.error("watching the fleet failed", exc_info=error)
