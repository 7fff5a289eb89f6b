"""How answers leave the router: a gateway's calls together on one stream.

Translates only. What a call is answered with comes from the `Answer` given; knows no worker and no session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import grpc
from outrider.errors import InternalError, InvalidRequest, OutriderError
from outrider.protocol.errors import to_route_error
from outrider.rpc.answers import let_end
from outrider.rpc.interceptor import frames
from outrider.rpc.v1 import router_pb2 as router

from outrider_controller.router.course import NewResponse

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Answer = Callable[[router.RouteRequest, NewResponse, float | None], Coroutine[Any, Any, None]]
"""Answers one request, within so many seconds if they are given. Returns after the round that finishes it; raises
OutriderError."""

# A response is small: some hundred bytes, and some thousand for a long commit. Gateways accept 32 MiB.
_MAX_RESPONSES = 4096


class Responses:
    """What waits to be written to one gateway: everything pending goes out in one message."""

    def __init__(self) -> None:
        self._messages: deque[router.RouteManyResponse] = deque()
        self._num_in_last = 0
        self._filled = asyncio.Event()
        self._ended = False

    def new(self) -> router.RouteResponse:
        """One more response, to be filled in at once: made in its place, it need not be copied there."""
        return self._last().responses.add()

    def fail(self, call_id: int, error: OutriderError) -> None:
        self._last().errors.append(to_route_error(call_id, error))

    def end(self) -> None:
        """Nothing more will be put."""
        self._ended = True
        self._filled.set()

    def drop(self) -> None:
        """Nobody is left to hear what was put."""
        self._messages.clear()
        self.end()

    async def take(self) -> router.RouteManyResponse | None:
        """The next message; waits until there is one. None at the end."""
        while not self._messages:
            if self._ended:
                return None
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()

    def _last(self) -> router.RouteManyResponse:
        if not self._messages or self._num_in_last >= _MAX_RESPONSES:
            self._messages.append(router.RouteManyResponse())
            self._num_in_last = 0
            self._filled.set()
        self._num_in_last += 1
        return self._messages[-1]


class GatewayStream:
    """One gateway's calls. Each fails by itself; with the stream, all are cancelled."""

    def __init__(self, answer: Answer, draining: asyncio.Event) -> None:
        self._answer = answer
        self._draining = draining
        self._responses = Responses()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, context: Context) -> None:
        """Until the gateway ends the stream, or until a draining router has answered all it took."""
        reader = asyncio.create_task(self._read(context), name="read gateway")
        writer = asyncio.create_task(self._write(context), name="write gateway")
        leaving = asyncio.create_task(self._leave(), name="leave gateway")
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks = [reader, leaving, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._responses.drop()
            await let_end(writer)

    async def _read(self, context: Context) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            for call in message.calls:
                self._begin(call)
            for call_id in message.cancelled:
                if task := self._calls.get(call_id):
                    task.cancel()

    async def _write(self, context: Context) -> None:
        while (message := await self._responses.take()) is not None:
            await context.write(message)

    async def _leave(self) -> None:
        await self._draining.wait()
        await self._idle.wait()
        self._responses.end()

    def _begin(self, call: router.RouteCall) -> None:
        if call.call_id in self._calls:
            self._responses.fail(call.call_id, InvalidRequest("call_id", "is in use on this stream"))
            return
        task = asyncio.create_task(self._serve(call), name=f"call {call.call_id}")
        self._calls[call.call_id] = task
        self._idle.clear()
        task.add_done_callback(lambda _: self._ended(call.call_id))

    def _ended(self, call_id: int) -> None:
        del self._calls[call_id]
        if not self._calls:
            self._idle.set()

    async def _serve(self, call: router.RouteCall) -> None:
        call_id = call.call_id

        def new_response() -> router.RouteResponse:
            response = self._responses.new()
            response.call_id = call_id
            return response

        try:
            await self._answer(call.request, new_response, call.timeout_us / 1e6 if call.timeout_us else None)
        except OutriderError as error:
            self._responses.fail(call_id, error)
        except Exception as error:
            log.error("%s while a call was answered\n%s", type(error).__name__, frames(error))
            self._responses.fail(call_id, InternalError("internal error"))
