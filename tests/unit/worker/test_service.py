"""A worker's streams: each hears its own, and one that does not listen harms no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from outrider.errors import Overloaded
from outrider.rpc.v1 import worker_pb2
from outrider.worker.events import Failed, SequenceKey, WorkerEvent, WorkerReport
from outrider.worker.service import WorkerServicer

from .fake_machine import FakeMachine


class FakeServicer(WorkerServicer[str, WorkerReport, str, list[str]]):
    def _events_of(self, stream: int, request: str) -> Iterable[str | WorkerEvent]:
        return [request]

    def _dispatch(self, report: WorkerReport) -> None:
        answers: dict[int, list[str]] = {}
        for failed in report.failures:
            answers.setdefault(failed.key.stream, []).append(str(failed.error))
        self._tell(answers, report)


class Peer:
    """One call: what it asks, and what it has read, once it reads."""

    def __init__(self) -> None:
        self.asks: asyncio.Queue[str | None] = asyncio.Queue()
        self.heard: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def write(self, answer: Any) -> None:
        await self.reads.wait()
        self.heard.append(answer)

    async def read(self) -> object:
        ask = await self.asks.get()
        return grpc.aio.EOF if ask is None else ask


def servicer(machine: FakeMachine, **more: Any) -> FakeServicer:
    return FakeServicer(machine, worker_pb2.WorkerInfo(worker_id="draft-1"), **more)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_is_asked_is_answered_on_its_stream_and_its_end_is_noted() -> None:
    machine, peer = FakeMachine(), Peer()
    async with servicer(machine) as serving:
        call = asyncio.create_task(serving._serve(peer))
        await peer.asks.put("hello")
        await until(lambda: peer.heard == [["hello"]])
        await peer.asks.put(None)
        await call
        await until(lambda: machine.ended_streams == [1])


async def test_a_peer_that_reads_nothing_is_ended_and_what_it_opened_is_closed() -> None:
    machine, deaf, other = FakeMachine(), Peer(), Peer()
    deaf.reads.clear()
    async with servicer(machine) as serving:
        serving.streams.max_unread = 4
        calls = [asyncio.create_task(serving._serve(peer)) for peer in (deaf, other)]
        await asyncio.sleep(0)
        for number in range(6):
            serving._tell({1: [str(number)], 2: [str(number)]}, WorkerReport())
            await asyncio.sleep(0)
        await until(lambda: machine.ended_streams == [1] and len(other.heard) == 6)
        assert not calls[0].done(), "it cannot be told while it does not read"
        deaf.reads.set()
        with pytest.raises(Overloaded, match="4 messages are unread"):
            await calls[0]
        assert deaf.heard == [["0"]]
        await other.asks.put(None)
        await calls[1]


async def test_a_worker_that_leaves_ends_the_streams_that_its_peers_keep_open() -> None:
    machine, peers = FakeMachine(), (Peer(), Peer())
    async with servicer(machine) as serving:
        calls = [asyncio.create_task(serving._serve(peer)) for peer in peers]
        await peers[0].asks.put("hello")
        await until(lambda: peers[0].heard == [["hello"]])
        serving.streams.end()
        await asyncio.gather(*calls)
        await until(lambda: sorted(machine.ended_streams) == [1, 2])
        serving._tell({1: ["late"]}, WorkerReport())
    assert peers[0].heard == [["hello"]]


async def test_a_deadline_of_the_call_itself_is_not_taken_for_a_peer_that_does_not_read() -> None:
    class Late(Peer):
        async def read(self) -> object:
            raise TimeoutError("theirs")

    async with servicer(FakeMachine()) as serving:
        with pytest.raises(TimeoutError, match="theirs"):
            await serving._serve(Late())


async def test_a_drain_is_in_the_load_at_once_and_over_when_nothing_is_open() -> None:
    machine = FakeMachine()
    async with servicer(machine) as serving:
        assert not serving.load_message().draining
        serving.start_drain()
        assert serving.load_message().draining
        async with asyncio.timeout(60):
            await serving.drained.wait()


async def test_what_was_said_last_is_flushed() -> None:
    peer = Peer()
    peer.reads.clear()
    async with servicer(FakeMachine()) as serving:
        call = asyncio.create_task(serving._serve(peer))
        await asyncio.sleep(0)
        serving._dispatch(WorkerReport(failures=[Failed(SequenceKey(1, 1), ValueError("last"))]))
        flushing = asyncio.create_task(serving.streams.flushed())
        await asyncio.sleep(0.01)
        assert not flushing.done()
        peer.reads.set()
        await flushing
        assert peer.heard == [["last"]]
        await peer.asks.put(None)
        await call
