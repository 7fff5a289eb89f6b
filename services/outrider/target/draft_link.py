"""The connection to one draft worker: one channel, one stream, one outbox."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import grpc

from outrider.errors import Unavailable
from outrider.protocol.limits import MAX_STREAM_BYTES
from outrider.protocol.outbox import Outbox
from outrider.rpc.channel import Connect
from outrider.rpc.streams import StreamEnded, read_stream, write_stream
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc
from outrider.supervision import stop, until_first_ends
from outrider.worker.events import SequenceKey

log = logging.getLogger(__name__)

UNREACHABLE = "DRAFT_UNREACHABLE"
"""Reason of an end before there was a connection."""

_CONNECT_TIMEOUT_S = 2.0
# A worker of which nothing is heard for so long, while sequences are open there, is asked whether it is there. It may
# rest, or compute for long; after so many questions without an answer it is given up.
_SILENCE_S = 1.0
_MAX_FAILED_PROBES = 2
# One that answers, but nothing of what it was asked for so long, no longer drafts.
_MAX_UNANSWERED_S = 120.0
# Nothing open there for so long, and it is closed.
_MAX_IDLE_S = 30.0
# Remembered, of which a last word on what they took is waited for.
_MAX_CLOSED = 4096


class DraftLink:
    """From the first sequence opened there until its stream ends, or nothing has been open there for a while.
    It does not reconnect: a router that wants this worker again says so, and gets a new link."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        connect: Connect,
        replied: Callable[[DraftLink, draft_pb2.DraftResponse], None],
        ended: Callable[[DraftLink, Unavailable], None],
        idle: Callable[[DraftLink], None],
        credential: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Begins to connect. The listeners are called in the event loop and must neither raise nor block; `ended` is
        called once, unless the link is stopped. After `idle` nothing more may be opened on it. `credential`: metadata
        of each call."""
        self.worker_id = worker_id
        self.address = address
        self.outbox: Outbox[draft_pb2.DraftRequest] = Outbox(draft_pb2.DraftRequest, MAX_STREAM_BYTES)
        self.keys: dict[int, SequenceKey] = {}
        """What is open there, by the id that it has there."""
        self.last_closed: OrderedDict[int, SequenceKey] = OrderedDict()
        """What was open there and may still be spoken of."""
        self._connect = connect
        self._credential = credential
        self._received = False
        self._asked_s: float | None = None
        self._replied = replied
        self._ended = ended
        self._idle = idle
        self._task = asyncio.create_task(self._run(), name=f"link {worker_id}")

    def asked(self) -> None:
        """The worker owes an answer now, if it is only that it has nothing to say."""
        if self._asked_s is None:
            self._asked_s = asyncio.get_running_loop().time()

    def closed(self, sequence_id: int) -> SequenceKey:
        """What was open there under this id no longer is. Raises KeyError for what was not."""
        key = self.last_closed[sequence_id] = self.keys.pop(sequence_id)
        if len(self.last_closed) > _MAX_CLOSED:
            self.last_closed.popitem(last=False)
        return key

    async def stop(self) -> None:
        await stop(self._task)

    async def _run(self) -> None:
        reason = UNREACHABLE
        try:
            async with self._connect(self.address) as channel:
                stub = draft_pb2_grpc.DraftServiceStub(channel)
                reply = await self._get_info(stub, _CONNECT_TIMEOUT_S)
                problem = "another worker answers at its address"
                if reply.info.worker_id == self.worker_id:
                    reason = "DRAFT_GONE"
                    await self._serve(stub)
        except StreamEnded as ended:
            problem = str(ended)
        except grpc.RpcError as error:
            problem = (error.details() if isinstance(error, grpc.aio.AioRpcError) else "") or "the connection broke"
        except Exception as error:
            log.exception("the link to draft %s failed", self.worker_id)
            problem = type(error).__name__
        self._ended(self, Unavailable(f"draft {self.worker_id}: {problem}", reason=reason))

    async def _serve(self, stub: draft_pb2_grpc.DraftServiceAsyncStub) -> None:
        """Reads, writes and watches until one of the three ends, then ends all. Raises StreamEnded."""
        call: Any = stub.Draft(metadata=self._credential)
        try:
            await until_first_ends(
                read_stream(call, self._take_reply), write_stream(call, self.outbox.take), self._watch(stub)
            )
        finally:
            call.cancel()

    async def _get_info(
        self, stub: draft_pb2_grpc.DraftServiceAsyncStub, timeout_s: float
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        request = draft_pb2.DraftServiceGetInfoRequest()
        return await stub.GetInfo(request, timeout=timeout_s, metadata=self._credential)

    def _take_reply(self, reply: draft_pb2.DraftResponse) -> None:
        self._received, self._asked_s = True, None
        self._replied(self, reply)

    async def _watch(self, stub: draft_pb2_grpc.DraftServiceAsyncStub) -> None:
        failed, idle_s = 0, 0.0
        while failed < _MAX_FAILED_PROBES:
            self._received = False
            await asyncio.sleep(_SILENCE_S)
            idle_s = 0.0 if self.keys else idle_s + _SILENCE_S
            if idle_s >= _MAX_IDLE_S:
                self._idle(self)
                raise StreamEnded("nothing is open there")
            if self._received or not self.keys:
                failed = 0
                continue
            if self._asked_s is not None and asyncio.get_running_loop().time() - self._asked_s > _MAX_UNANSWERED_S:
                raise StreamEnded("it answers nothing of what it is asked")
            try:
                await self._get_info(stub, _SILENCE_S)
                failed = 0
            except grpc.RpcError:
                failed += 1
        raise StreamEnded("it is silent, and does not answer")
