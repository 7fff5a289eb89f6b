"""One stream with all of a gateway's requests to one router. A message carries everything of one engine step."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from outrider.errors import Code, DeadlineExceeded, OutriderError, make_error
from outrider.protocol.errors import from_route_error
from outrider.rpc.link import StreamEnded, converse
from outrider.rpc.outbox import BatchingOutbox
from outrider.rpc.v1 import router_pb2, router_pb2_grpc
from outrider.runtime.supervision import stop

log = logging.getLogger(__name__)


Credential = tuple[tuple[str, str], ...]
"""Call metadata that authenticates this gateway to a router."""
_CANCEL_BYTES = 8
_Rounds = asyncio.Queue[router_pb2.RouteResponse | OutriderError]
BrokenCalls = deque[router_pb2.BrokenCall]
# Those that every new stream tells of.
_MAX_BROKEN = 4096


def no_broken_calls() -> BrokenCalls:
    return deque(maxlen=_MAX_BROKEN)


class RouterStream:
    """Opens the stream with the first request, and a new one after a break. `close` it."""

    def __init__(
        self,
        stub: router_pb2_grpc.RouterServiceAsyncStub,
        credential: Credential = (),
        broken: BrokenCalls | None = None,
    ) -> None:
        """`broken`: the calls of all streams that broke off last; those of this stream are added."""
        self._stub = stub
        self._credential = credential
        self._broken = no_broken_calls() if broken is None else broken
        self._connection: _Connection | None = None

    async def route(
        self, request: router_pb2.RouteRequest, timeout_s: float
    ) -> AsyncGenerator[router_pb2.RouteResponse, None]:
        """The rounds of one request, up to the one with a finish reason. Leaving early cancels the request.

        Raises OutriderError: the router's error, DeadlineExceeded after `timeout_s`, or, without a reason, the
        transport's error when the stream broke.
        """
        if self._connection is None or self._connection.broken:
            self._connection = _Connection(self._stub, self._credential)
            for call in self._broken:
                self._connection.tell(call)
        connection = self._connection
        call_id, rounds = connection.begin(request, timeout_s)
        too_late = DeadlineExceeded("the router has not answered in time")
        timer = asyncio.get_running_loop().call_later(timeout_s, rounds.put_nowait, too_late)
        finished, num_tokens = False, 0
        try:
            while not finished:
                event = await rounds.get()
                if isinstance(event, OutriderError):
                    finished = event is not too_late
                    if event.reason is None:
                        self._broke_off(connection, router_pb2.BrokenCall(call_id=call_id, num_tokens=num_tokens))
                    raise event
                finished = bool(event.finish_reason)
                num_tokens += len(event.token_ids)
                yield event
        finally:
            timer.cancel()
            connection.end(call_id, cancel=not finished)

    def _broke_off(self, connection: _Connection, call: router_pb2.BrokenCall) -> None:
        self._broken.append(call)
        # Another request may have opened the next stream before.
        if self._connection is not None and self._connection is not connection:
            self._connection.tell(call)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class _Connection:
    """One stream, from its first request until it breaks."""

    def __init__(self, stub: router_pb2_grpc.RouterServiceAsyncStub, credential: Credential) -> None:
        self.broken = False
        self._call: Any = stub.RouteMany(metadata=credential)
        self._ids = itertools.count(secrets.randbits(62) + 1)
        self._rounds: dict[int, _Rounds] = {}
        self._outbox = BatchingOutbox(router_pb2.RouteManyRequest)
        self._task = asyncio.create_task(self._run(), name="router stream")

    def begin(self, request: router_pb2.RouteRequest, timeout_s: float) -> tuple[int, _Rounds]:
        call_id, rounds = next(self._ids), _Rounds()
        self._rounds[call_id] = rounds
        call = router_pb2.RouteCall(call_id=call_id, request=request, timeout_us=max(1, int(timeout_s * 1e6)))
        self._outbox.last(call.ByteSize()).calls.append(call)
        return call_id, rounds

    def tell(self, broken: router_pb2.BrokenCall) -> None:
        self._outbox.last(broken.ByteSize()).broken.append(broken)

    def end(self, call_id: int, *, cancel: bool) -> None:
        del self._rounds[call_id]
        if cancel and not self.broken:
            self._outbox.last(_CANCEL_BYTES).cancelled.append(call_id)

    async def close(self) -> None:
        await stop(self._task)
        self._break(make_error(Code.CANCELLED, "the gateway closed the stream"))

    async def _run(self) -> None:
        """Whenever the stream ends, every request on it gets an error, so that none waits for its deadline."""
        try:
            await converse(self._call, self._hand_out, self._outbox)
        except OutriderError as error:
            self._break(error)
        except Exception as error:
            log.exception("a stream to a router failed")
            self._break(StreamEnded(type(error).__name__))

    def _hand_out(self, message: router_pb2.RouteManyResponse) -> None:
        for response in message.responses:
            # None: the request was cancelled, and the router does not know it yet.
            if rounds := self._rounds.get(response.call_id):
                rounds.put_nowait(response)
        for error in message.errors:
            if rounds := self._rounds.get(error.call_id):
                rounds.put_nowait(from_route_error(error))

    def _break(self, error: OutriderError) -> None:
        self.broken = True
        for rounds in self._rounds.values():
            rounds.put_nowait(error)
