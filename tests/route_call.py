"""One call of RouteMany on a stream of its own, for tests that look at a call by itself."""

from __future__ import annotations

from collections import deque
from typing import Any

import grpc
from outrider.errors import Unavailable
from outrider.protocol.errors import from_route_error
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import router_pb2_grpc


class RouteCall:
    """Made when it is first read. Whatever it ends with but a finish is raised as an OutriderError."""

    def __init__(
        self, stub: router_pb2_grpc.RouterServiceAsyncStub, request: router.RouteRequest, timeout_s: float | None = None
    ) -> None:
        timeout_us = max(1, round(timeout_s * 1e6)) if timeout_s is not None else 0
        made = router.RouteCall(call_id=1, request=request, timeout_us=timeout_us)
        self._calls: router.RouteManyRequest | None = router.RouteManyRequest(calls=[made])
        self._stream: Any = stub.RouteMany(wait_for_ready=True)
        self._arrived: deque[router.RouteResponse] = deque()
        self._finished = False

    def __aiter__(self) -> RouteCall:
        return self

    async def __anext__(self) -> router.RouteResponse:
        if self._finished:
            self.cancel()
            raise StopAsyncIteration
        return await self.read()

    async def read(self) -> router.RouteResponse:
        """The next round."""
        try:
            while not self._arrived:
                await self._receive()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        response = self._arrived.popleft()
        self._finished = bool(response.finish_reason)
        return response

    def cancel(self) -> None:
        self._stream.cancel()

    async def _receive(self) -> None:
        if self._calls is not None:
            calls, self._calls = self._calls, None
            await self._stream.write(calls)
        message = await self._stream.read()
        if message is grpc.aio.EOF:
            raise Unavailable("the stream ended")
        self._arrived.extend(response for response in message.responses if not response.phase)
        for error in message.errors:
            self.cancel()
            raise from_route_error(error)
