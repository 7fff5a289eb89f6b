"""The gateway's one stream to a router: what is left of it when it breaks."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from outrider.errors import Code, OutriderError
from outrider.gateway.routers.router_stream import RouterStream
from outrider.rpc.v1 import router_pb2 as router


class Call:
    """A stream that says nothing until it ends."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.written: list[router.RouteManyRequest] = []

    async def read(self) -> object:
        await self.ended.wait()
        return grpc.aio.EOF

    async def write(self, message: router.RouteManyRequest) -> None:
        self.written.append(message)

    def cancel(self) -> None:
        self.ended.set()

    async def details(self) -> str:
        return "the router is gone"


class Stub:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def RouteMany(self, metadata: object) -> Call:
        self.calls.append(Call())
        return self.calls[-1]


async def broken_request(stream: RouterStream, stub: Stub) -> None:
    """One that is under way when its connection ends."""

    async def ask() -> None:
        async for _ in stream.route(router.RouteRequest(), timeout_s=30):
            raise AssertionError("nothing was said")

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.01)
    assert len(stub.calls[-1].written) == 1
    stub.calls[-1].ended.set()
    with pytest.raises(OutriderError, match="stream ended: the router is gone"):
        await asking


def test_a_broken_connection_leaves_no_task_behind_and_the_next_request_gets_another() -> None:
    async def scenario() -> set[str]:
        stub = Stub()
        stream = RouterStream(stub)  # type: ignore[arg-type]
        for _ in range(3):
            await broken_request(stream, stub)
        await asyncio.sleep(0)
        assert len(stub.calls) == 3
        left = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        await stream.close()
        return left

    assert asyncio.run(scenario()) == set()


class Garbled(Call):
    """A stream whose first message is what gRPC makes of it."""

    def __init__(self, message: object) -> None:
        super().__init__()
        self._message = message
        self._asked = asyncio.Event()

    async def write(self, message: router.RouteManyRequest) -> None:
        self._asked.set()

    async def read(self) -> object:
        await self._asked.wait()
        return self._message


@pytest.mark.parametrize("message", [None, object()], ids=["bytes that do not parse", "what nobody foresaw"])
async def test_a_message_that_cannot_be_read_breaks_the_stream_and_its_requests_hear_of_it_at_once(
    message: object,
) -> None:
    class GarbledStub(Stub):
        def RouteMany(self, metadata: object) -> Call:
            self.calls.append(Garbled(message))
            return self.calls[-1]

    stream = RouterStream(GarbledStub())  # type: ignore[arg-type]

    async def ask() -> None:
        async for _ in stream.route(router.RouteRequest(), timeout_s=30):
            raise AssertionError("nothing was said")

    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(ask(), ask(), return_exceptions=True)
    for error in outcomes:
        assert isinstance(error, OutriderError)
        # Without a reason it is the transport's word: the request goes on with another router.
        assert (error.code, error.reason) == (Code.UNAVAILABLE, None)
    await stream.close()
