"""The connection to one draft worker: one channel, one stream, one outbox."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.errors import Unavailable
from outrider.protocol.sequence_key import SequenceKey
from outrider.rpc.channel import Connect
from outrider.rpc.outbox import BatchingOutbox
from outrider.rpc.streams import StreamEnded, read_stream, write_stream
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc
from outrider.runtime.supervision import stop, until_first_ends

log = logging.getLogger(__name__)

UNREACHABLE = "DRAFT_UNREACHABLE"
"""Reason of a link that ended before it was connected."""

_CONNECT_TIMEOUT_S = 2.0
# When a worker with open sequences has sent nothing for this long, it is probed: it may be idle, or in a long step.
# After this many probes without an answer the link ends.
_SILENCE_S = 1.0
_MAX_FAILED_PROBES = 2
# A worker that answers probes, but owes a proposal for this long, no longer drafts.
_MAX_UNANSWERED_S = 120.0
# A link with nothing open for this long is closed.
_MAX_IDLE_S = 30.0
# Closed sequences that are remembered until the draft has reported their costs.
_MAX_CLOSED = 4096


@dataclass(frozen=True, slots=True)
class Listener:
    """Receives the reports of the links. Called in the event loop; must neither raise nor block."""

    replied: Callable[[DraftLink, draft_pb2.DraftResponse], None]
    ended: Callable[[DraftLink, Unavailable], None]
    """Once, unless the link is stopped."""
    idle: Callable[[DraftLink], None]
    """Nothing more may be opened on it."""


class DraftLink:
    """Lives from the first sequence opened there until its stream ends or it has been idle for a while. It does not
    reconnect: when a router names this worker again, a new link is made."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        connect: Connect,
        listener: Listener,
        credential: tuple[tuple[str, str], ...],
    ) -> None:
        """Begins to connect. `credential`: metadata of each call."""
        self.worker_id = worker_id
        self.address = address
        self.outbox = BatchingOutbox(draft_pb2.DraftRequest)
        self.keys: dict[int, SequenceKey] = {}
        """The sequences open there, by their id on this link."""
        self.last_closed: OrderedDict[int, SequenceKey] = OrderedDict()
        """Closed sequences of which reports may still arrive, by their id on this link."""
        self._connect = connect
        self._credential = credential
        self._received = False
        self._asked_s: float | None = None
        self._listener = listener
        self._task = asyncio.create_task(self._run(), name=f"link {worker_id}")

    def asked(self) -> None:
        """From now on the worker owes an answer, if only an empty proposal."""
        if self._asked_s is None:
            self._asked_s = asyncio.get_running_loop().time()

    def closed(self, sequence_id: int) -> SequenceKey:
        """Closes the sequence with this id. Raises KeyError when it is not open there."""
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
        self._listener.ended(self, Unavailable(f"draft {self.worker_id}: {problem}", reason=reason))

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
        self._listener.replied(self, reply)

    async def _watch(self, stub: draft_pb2_grpc.DraftServiceAsyncStub) -> None:
        failed, idle_s = 0, 0.0
        while failed < _MAX_FAILED_PROBES:
            self._received = False
            await asyncio.sleep(_SILENCE_S)
            idle_s = 0.0 if self.keys else idle_s + _SILENCE_S
            if idle_s >= _MAX_IDLE_S:
                self._listener.idle(self)
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
