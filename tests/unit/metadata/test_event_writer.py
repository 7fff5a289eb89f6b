"""Events are handed over without waiting, and what happens to many at once is told once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind, FieldValue


class Stream:
    """Takes events while it is open."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, FieldValue]]] = []
        self.open = asyncio.Event()
        self.broken = False

    async def emit(self, kind: str, fields: Mapping[str, FieldValue]) -> None:
        await self.open.wait()
        if self.broken:
            raise RuntimeError("broken")
        self.taken.append((kind, dict(fields)))


async def test_what_many_requests_meet_in_one_moment_is_one_event_with_a_count() -> None:
    stream = Stream()
    stream.open.set()
    async with EventWriter(stream).running() as events:
        for number in range(1000):
            events.emit(EventKind.TARGET_LOST, {"worker_id": "t1", "reason": "connection"}, request_id=f"r{number}")
        events.emit(EventKind.TARGET_LOST, {"worker_id": "t2", "reason": "connection"}, request_id="other")
    first = {"worker_id": "t1", "reason": "connection", "request_id": "r0", "count": 1000}
    second = {"worker_id": "t2", "reason": "connection", "request_id": "other"}
    assert stream.taken == [("target_lost", first), ("target_lost", second)]


async def test_a_store_that_hangs_costs_events_and_never_a_caller() -> None:
    stream = Stream()
    async with EventWriter(stream).running() as events:
        for number in range(400):
            events.emit(EventKind.WORKER_JOINED, {"worker_id": f"w{number}"})
        assert events.num_dropped == 400 - 256
        stream.open.set()
    assert len(stream.taken) == 256


async def test_one_event_that_cannot_be_written_does_not_keep_the_next_ones() -> None:
    stream = Stream()
    stream.open.set()
    stream.broken = True
    async with EventWriter(stream).running() as events:
        events.emit(EventKind.WORKER_LOST, {"worker_id": "w1"})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.broken = False
        events.emit(EventKind.WORKER_LOST, {"worker_id": "w2"})
    assert stream.taken[-1] == ("worker_lost", {"worker_id": "w2"})
