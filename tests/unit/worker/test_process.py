"""How a worker's process ends, whatever kind of worker it is."""

from __future__ import annotations

import asyncio
from typing import cast

from outrider.metadata.lease import Lease
from outrider.rpc.server import ServerLife
from outrider.rpc.v1 import worker_pb2
from outrider.worker.process import RunningWorker


class FakeServicer:
    """Notes what is asked of it, in order."""

    def __init__(self, told: list[str]) -> None:
        self.drained = asyncio.Event()
        self._told = told

    def load_message(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(num_running=1)

    def start_drain(self) -> None:
        self._told.append("start")

    def expire_drain(self) -> None:
        self._told.append("expire")
        self.drained.set()

    async def flushed(self) -> None:
        self._told.append("flush")


class FakeLease:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def wake(self) -> None:
        self._told.append("lease")


def running(told: list[str]) -> RunningWorker[FakeServicer]:
    return RunningWorker(FakeServicer(told), cast(ServerLife, None), cast(Lease, FakeLease(told)))


async def test_a_drain_is_said_at_once_and_ends_when_all_that_was_said_has_left() -> None:
    told: list[str] = []
    worker = running(told)
    draining = asyncio.create_task(worker.drain(timeout_s=60))
    await asyncio.sleep(0)
    assert told == ["start", "lease"]
    worker.servicer.drained.set()
    await draining
    assert told == ["start", "lease", "flush"]


async def test_what_does_not_end_in_time_is_given_back_and_that_is_said_too() -> None:
    told: list[str] = []
    await running(told).drain(timeout_s=0.01)
    assert told == ["start", "lease", "expire", "flush"]
