"""All of a gateway's requests to one router, on one stream: a message carries everything of one engine step."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import grpc

from outrider.errors import Code, DeadlineExceeded, OutriderError, make_error
from outrider.rpc.status import from_route_error, from_rpc_error
from outrider.rpc.v1 import router_pb2, router_pb2_grpc

# A message is closed and the next begun beyond this size; routers accept 32 MiB.
_MAX_MESSAGE_BYTES = 1 << 20
_Rounds = asyncio.Queue[router_pb2.RouteResponse | OutriderError]


class RouterStream:
    """Opens the stream with the first request, and another when that one broke. `close` it."""

    def __init__(self, stub: router_pb2_grpc.RouterServiceAsyncStub) -> None:
        self._stub = stub
        self._connection: _Connection | None = None

    async def route(
        self, request: router_pb2.RouteRequest, timeout_s: float
    ) -> AsyncGenerator[router_pb2.RouteResponse, None]:
        """The rounds of one request, up to the one with a finish reason. Leaving early cancels the request.

        Raises OutriderError: what the router said; DeadlineExceeded after `timeout_s`; without a reason in it, what the
        transport said when the stream broke.
        """
        if self._connection is None or self._connection.broken:
            self._connection = _Connection(self._stub)
        connection = self._connection
        call_id, rounds = connection.begin(request, timeout_s)
        too_late = DeadlineExceeded("the router has not answered in time")
        timer = asyncio.get_running_loop().call_later(timeout_s, rounds.put_nowait, too_late)
        finished = False
        try:
            while not finished:
                event = await rounds.get()
                if isinstance(event, OutriderError):
                    finished = event is not too_late
                    raise event
                finished = bool(event.finish_reason)
                yield event
        finally:
            timer.cancel()
            connection.end(call_id, cancel=not finished)

    async def close(self) -> None:
        """Breaks what still runs."""
        if self._connection is not None:
            await self._connection.close()


class _Connection:
    """One stream, from its first request until it breaks."""

    def __init__(self, stub: router_pb2_grpc.RouterServiceAsyncStub) -> None:
        self.broken = False
        self._call: Any = stub.RouteMany()
        self._ids = itertools.count(1)
        self._rounds: dict[int, _Rounds] = {}
        self._pending: deque[router_pb2.RouteManyRequest] = deque()
        self._filled = asyncio.Event()
        self._reader = asyncio.create_task(self._read(), name="read router")
        self._writer = asyncio.create_task(self._write(), name="write router")

    def begin(self, request: router_pb2.RouteRequest, timeout_s: float) -> tuple[int, _Rounds]:
        call_id, rounds = next(self._ids), _Rounds()
        self._rounds[call_id] = rounds
        call = router_pb2.RouteCall(call_id=call_id, request=request, timeout_us=max(1, int(timeout_s * 1e6)))
        self._last(call.ByteSize()).calls.append(call)
        return call_id, rounds

    def end(self, call_id: int, *, cancel: bool) -> None:
        del self._rounds[call_id]
        if cancel and not self.broken:
            self._last(0).cancelled.append(call_id)

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)
        self._break(make_error(Code.CANCELLED, "the gateway closed the stream"))

    def _last(self, more_bytes: int) -> router_pb2.RouteManyRequest:
        if not self._pending or self._pending[-1].ByteSize() + more_bytes > _MAX_MESSAGE_BYTES:
            self._pending.append(router_pb2.RouteManyRequest())
            self._filled.set()
        return self._pending[-1]

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._hand_out(message)
            self._break(make_error(Code.UNAVAILABLE, "the router ended the stream"))
        except grpc.RpcError as error:
            self._break(from_rpc_error(error))

    def _hand_out(self, message: router_pb2.RouteManyResponse) -> None:
        for response in message.responses:
            # None: the request was left, and the router has not heard of it yet.
            if rounds := self._rounds.get(response.call_id):
                rounds.put_nowait(response)
        for error in message.errors:
            if rounds := self._rounds.get(error.call_id):
                rounds.put_nowait(from_route_error(error))

    async def _write(self) -> None:
        # What broke the stream is what the reader finds.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                while not self._pending:
                    self._filled.clear()
                    await self._filled.wait()
                await self._call.write(self._pending.popleft())

    def _break(self, error: OutriderError) -> None:
        self.broken = True
        # It may be waiting for something to write, which will not come: another connection takes the place of this one.
        self._writer.cancel()
        for rounds in self._rounds.values():
            rounds.put_nowait(error)
