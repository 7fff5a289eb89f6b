"""A stream between two processes, over loopback: it comes back, its end has the reason, and silence is noticed."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from outrider.errors import Unavailable
from outrider.rpc.channel import create_channel
from outrider.rpc.link import PeerLink, StreamEnded, answering, read_stream, watch_silence
from outrider.rpc.outbox import BatchingOutbox, Outbox
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, sequence_pb2
from outrider.runtime.supervision import Backoff, stop, until_first_ends

SERVICE = "outrider.rpc.v1.DraftService"


class Peer(draft_pb2_grpc.DraftServiceServicer):
    """Answers each close with an error of its id, and ends the stream after the third."""

    async def Draft(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        outbox, num_closed = Outbox[draft_pb2.DraftResponse](), 0

        def received(message: draft_pb2.DraftRequest) -> None:
            nonlocal num_closed
            for close in message.closes:
                error = sequence_pb2.SequenceError(sequence_id=close.sequence_id)
                outbox.put(draft_pb2.DraftResponse(errors=[error]))
                num_closed += 1
            if num_closed == 3:
                raise Unavailable("three are enough", reason="THREE")

        async with answering(context, outbox) as over:
            await until_first_ends(read_stream(context, received), over())


@asynccontextmanager
async def peer_at(address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = create_server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(Peer(), server)
    async with serving(server, address, services=[SERVICE], grace_s=0.1) as life:
        yield life.address


class Link(PeerLink[draft_pb2.DraftResponse, BatchingOutbox[draft_pb2.DraftRequest]]):
    def __init__(self, address: str) -> None:
        super().__init__("draft d", create_channel, BatchingOutbox(draft_pb2.DraftRequest), address)
        self.answers: asyncio.Queue[int] = asyncio.Queue()
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()

    def close(self, sequence_id: int) -> None:
        self.outbox.last(8).closes.add(sequence_id=sequence_id)

    async def _call(self, channel: grpc.aio.Channel) -> Any:
        await asyncio.wait_for(channel.channel_ready(), 0.5)
        self._connected()
        return draft_pb2_grpc.DraftServiceStub(channel).Draft()

    def _received(self, message: draft_pb2.DraftResponse) -> None:
        for error in message.errors:
            self.answers.put_nowait(error.sequence_id)

    async def _watch(self, call: Any) -> None:
        await asyncio.Event().wait()

    def _ended(self, why: Exception | None) -> None:
        self.ends.put_nowait(why)


async def test_a_stream_comes_back_and_its_end_has_the_word_of_the_peer_that_ended_it() -> None:
    async with asyncio.timeout(60), peer_at() as address:
        link = Link("")
        keeping = asyncio.create_task(link.keep(itertools.repeat(address), Backoff(0.01, 0.01)))
        link.close(1)
        assert await link.answers.get() == 1
        link.close(2)
        link.close(3)
        why = await link.ends.get()
        assert isinstance(why, Unavailable) and (why.message, why.reason) == ("three are enough", "THREE")
        while link.answers.empty():
            # What is put between two streams is for neither.
            link.close(4)
            await asyncio.sleep(0.01)
        await stop(keeping)


async def test_an_unreachable_peer_is_reported_once_until_it_was_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.rpc.link")
    async with asyncio.timeout(60):
        async with peer_at() as address:
            pass
        link = Link("")
        keeping = asyncio.create_task(link.keep(itertools.repeat(address), Backoff(0.01, 0.01)))
        for _ in range(2):
            for _ in range(2):
                while not isinstance(await link.ends.get(), StreamEnded):
                    pass
            async with peer_at(address):
                while not caplog.messages[-1].endswith("connected"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await stop(keeping)
    lines = [message for message in caplog.messages if "no answer in time" in message]
    assert len(lines) == 2 and lines[0] == f"draft d at {address}: no answer in time"


async def test_a_silent_peer_is_given_up_after_so_many_probes_in_a_row_that_it_does_not_answer() -> None:
    answers = iter([False, True, False, False, True])

    async def probe() -> None:
        if not next(answers):
            raise grpc.RpcError

    with pytest.raises(StreamEnded, match=r"silent for 2.0 s"):
        await watch_silence(lambda: 2.0, probe, every_s=0.0, after_s=1.0, most=2)
    assert list(answers) == [True]


def messages() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, draft_pb2.DraftRequest | draft_pb2.DraftResponse)]


async def test_an_idle_stream_holds_no_message_at_either_end() -> None:
    # Of other tests.
    known = messages()
    async with asyncio.timeout(60), peer_at() as address:
        link = Link(address)
        talking = asyncio.create_task(link.talk())
        link.close(1)
        await link.answers.get()
        await link.outbox.idle.wait()
        await asyncio.sleep(0.1)
        held = [one for one in messages() if not any(one is each for each in known)]
        await stop(talking)
    assert held == []
