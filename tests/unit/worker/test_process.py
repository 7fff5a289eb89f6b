"""How a worker's process ends, whatever kind of worker it is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

from outrider.metadata.workers.lease import Lease
from outrider.rpc.server import ServerLife
from outrider.rpc.v1 import worker_pb2
from outrider.target.config import TargetConfig
from outrider.worker.process import RunningWorker, serve_until_stopped


class FakeServicer:
    """Notes what is asked of it, in order."""

    def __init__(self, calls: list[str]) -> None:
        self.drained = asyncio.Event()
        self.streams = self
        self._calls = calls

    def load_message(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(num_running=1)

    def start_drain(self) -> None:
        self._calls.append("start")

    def expire_drain(self) -> None:
        self._calls.append("expire")
        self.drained.set()

    async def flushed(self) -> None:
        self._calls.append("flush")


class FakeLease:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def wake(self) -> None:
        self._calls.append("lease")


def running(calls: list[str]) -> RunningWorker[FakeServicer]:
    return RunningWorker(FakeServicer(calls), cast(ServerLife, None), cast(Lease, FakeLease(calls)))


async def test_a_drain_is_said_at_once_and_ends_when_all_that_was_said_has_left() -> None:
    calls: list[str] = []
    worker = running(calls)
    draining = asyncio.create_task(worker.drain(timeout_s=60))
    await asyncio.sleep(0)
    assert calls == ["start", "lease"]
    worker.servicer.drained.set()
    await draining
    assert calls == ["start", "lease", "flush"]


async def test_what_does_not_end_in_time_is_given_back_and_that_is_said_too() -> None:
    calls: list[str] = []
    await running(calls).drain(timeout_s=0.01)
    assert calls == ["start", "lease", "expire", "flush"]


async def test_while_it_serves_the_collector_passes_over_what_was_there_before() -> None:
    """A pass over a model's modules stops a step for half a second."""
    servicer = FakeServicer([])
    servicer.steps, servicer.step_limit_s = SimpleNamespace(busy_since_s=None), lambda timeout_s: timeout_s  # type: ignore[attr-defined]
    servicer.drained.set()
    life, frozen = SimpleNamespace(draining=asyncio.Event(), address="here"), list[int]()

    @asynccontextmanager
    async def worker() -> AsyncIterator[RunningWorker[FakeServicer]]:
        asyncio.get_running_loop().call_soon(lambda: frozen.append(gc.get_freeze_count()))
        asyncio.get_running_loop().call_soon(life.draining.set)
        yield RunningWorker(servicer, cast(ServerLife, life), None)

    gc.unfreeze()
    before = gc.get_freeze_count()
    await serve_until_stopped(worker(), worker_pb2.WorkerInfo(), TargetConfig(model="any", listen="127.0.0.1:0"))
    assert frozen[0] > before == gc.get_freeze_count()
