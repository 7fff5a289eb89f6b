"""The stream from a server to the router that says how its requests speculate. Lives in an event loop.

While there is no router, it looks for one. A new stream begins with all open sequences.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from outrider.rpc.channel import Connect
from outrider.rpc.streams import StreamEnded, read_stream, write_stream
from outrider.rpc.v1 import attach_pb2, attach_pb2_grpc, sequence_pb2, target_pb2, worker_pb2
from outrider.runtime.supervision import Backoff, keep_running, until_first_ends

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_BEAT_S = 1.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 2.0
_MAX_UNWRITTEN = 4096
"""Messages that wait for a router. One that leaves more unread has stopped."""


@dataclass(frozen=True, slots=True)
class RouterReach:
    addresses: Sequence[str]
    connect: Connect
    credential: tuple[tuple[str, str], ...]
    info: worker_pb2.WorkerInfo
    load: Callable[[], worker_pb2.WorkerLoad]


@dataclass(slots=True)
class RouterLink:
    reach: RouterReach
    received: Callable[[target_pb2.VerifyRequest], None]
    changed: Callable[[], None]
    attached: bool = False
    """Whether a router follows the open sequences."""
    _open: dict[int, sequence_pb2.OpenSequence] = field(default_factory=dict)
    """As they would be announced now, by id."""
    _unwritten: asyncio.Queue[attach_pb2.AttachRequest] = field(default_factory=asyncio.Queue)

    async def run(self) -> NoReturn:
        addresses, reported = itertools.cycle(self.reach.addresses), set[str]()

        async def connect() -> None:
            address = next(addresses)
            try:
                await self._serve(address)
            except (StreamEnded, grpc.RpcError, TimeoutError) as error:
                why = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                raise ConnectionError(f"no router at {address}: {why or type(error).__name__}") from None

        def failed(error: Exception) -> None:
            if str(error) not in reported:
                log.warning("%s", error, exc_info=None if isinstance(error, ConnectionError) else error)
            reported.add(str(error))

        await keep_running(connect, Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S), failed)

    def open(self, announced: sequence_pb2.OpenSequence) -> None:
        self._open[announced.sequence_id] = announced
        self._send(attach_pb2.AttachRequest(opens=[announced]))

    def step(self, response: target_pb2.VerifyResponse) -> None:
        for commit in response.commits:
            if commit.finish_reason:
                self._open.pop(commit.sequence_id, None)
            elif (announced := self._open.get(commit.sequence_id)) is not None:
                announced.committed_token_ids.extend(commit.token_ids)
        self._send(attach_pb2.AttachRequest(step=response))

    def close(self, closed: sequence_pb2.CloseSequence) -> None:
        if self._open.pop(closed.sequence_id, None) is not None:
            self._send(attach_pb2.AttachRequest(closes=[closed]))

    def erased(self, num_texts: int) -> None:
        """The answer to the oldest erasure that has none."""
        self._send(attach_pb2.AttachRequest(erased=[target_pb2.EraseHistoryResponse(num_texts=num_texts)]))

    def _send(self, message: attach_pb2.AttachRequest) -> None:
        if self.attached:
            # Copied: an announcement grows with its commits while it waits.
            self._unwritten.put_nowait(attach_pb2.AttachRequest.FromString(message.SerializeToString()))

    async def _serve(self, address: str) -> None:
        async with self.reach.connect(address) as channel:
            stub: Any = attach_pb2_grpc.AttachServiceStub(channel)
            call = stub.Attach(metadata=self.reach.credential)
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await call.write(attach_pb2.AttachRequest(info=self.reach.info, load=self.reach.load()))
                    # The router has taken this server.
                    await call.wait_for_connection()
                self._begin()
                log.info("attached to the router at %s", address)
                await until_first_ends(
                    read_stream(call, self.received), write_stream(call, self._unwritten.get), self._beat()
                )
            except asyncio.InvalidStateError:
                raise StreamEnded(str(await call.details() or "the stream ended")) from None
            finally:
                call.cancel()
                if self.attached:
                    self.attached = False
                    self.changed()

    def _begin(self) -> None:
        self._unwritten = asyncio.Queue()
        self.attached = True
        for announced in self._open.values():
            self._send(attach_pb2.AttachRequest(opens=[announced]))
        self.changed()

    async def _beat(self) -> NoReturn:
        while True:
            await asyncio.sleep(_BEAT_S)
            if self._unwritten.qsize() > _MAX_UNWRITTEN:
                raise StreamEnded("it does not read")
            self._send(attach_pb2.AttachRequest(load=self.reach.load()))
