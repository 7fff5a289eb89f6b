"""The connection to one draft worker: one channel, one stream, one outbox. Notices that the worker is gone: its stream
breaks, or it is silent."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.errors import Unavailable
from outrider.rpc.channel import Connect
from outrider.rpc.link import PeerLink, StreamEnded, problem_of, watch_silence
from outrider.rpc.outbox import BatchingOutbox
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc
from outrider.runtime.supervision import stop
from outrider.sequence.key import SequenceKey

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


class DraftLink(PeerLink[draft_pb2.DraftResponse, BatchingOutbox[draft_pb2.DraftRequest]]):
    """Lives from the first sequence opened there until its stream ends or it has been idle for a while. It does not
    reconnect: when a router names this worker again, a new link is made."""

    level = logging.DEBUG

    def __init__(
        self,
        worker_id: str,
        address: str,
        connect: Connect,
        listener: Listener,
        credential: tuple[tuple[str, str], ...],
    ) -> None:
        """Begins to connect. `credential`: metadata of each call."""
        super().__init__(f"draft {worker_id}", connect, BatchingOutbox(draft_pb2.DraftRequest), address)
        self.worker_id = worker_id
        self.keys: dict[int, SequenceKey] = {}
        """The sequences open there, by their id on this link."""
        self.last_closed: OrderedDict[int, SequenceKey] = OrderedDict()
        """Closed sequences of which reports may still arrive, by their id on this link."""
        self._credential = credential
        self._listener = listener
        self._stub: draft_pb2_grpc.DraftServiceAsyncStub
        self._clock = asyncio.get_running_loop().time
        self._received_s = self._used_s = self._clock()
        self._drafting: set[int] = set()
        """The sequences of which drafts are wanted, by their id on this link."""
        self._asked_s: float | None = None
        self._reason = UNREACHABLE
        self._task = asyncio.create_task(self.talk(), name=f"link {worker_id}")

    def asked(self) -> None:
        """From now on the worker owes an answer, if only an empty proposal."""
        if self._asked_s is None:
            self._asked_s = self._clock()

    def wants(self, sequence_id: int, *, drafts: bool) -> None:
        """From now on drafts of this sequence are wanted, or not. Where none are, the worker owes no answer."""
        if drafts:
            self._drafting.add(sequence_id)
        else:
            self._drafting.discard(sequence_id)
        if not self._drafting:
            self._asked_s = None

    def closed(self, sequence_id: int) -> SequenceKey:
        """Closes the sequence with this id. Raises KeyError when it is not open there."""
        self.wants(sequence_id, drafts=False)
        key = self.last_closed[sequence_id] = self.keys.pop(sequence_id)
        if len(self.last_closed) > _MAX_CLOSED:
            self.last_closed.popitem(last=False)
        return key

    async def stop(self) -> None:
        await stop(self._task)

    async def _call(self, channel: grpc.aio.Channel) -> Any:
        self._stub = draft_pb2_grpc.DraftServiceStub(channel)
        reply = await self._get_info(_CONNECT_TIMEOUT_S)
        if reply.info.worker_id != self.worker_id:
            raise StreamEnded("another worker answers at its address")
        self._reason = "DRAFT_GONE"
        return self._stub.Draft(metadata=self._credential)

    async def _get_info(self, timeout_s: float) -> draft_pb2.DraftServiceGetInfoResponse:
        request = draft_pb2.DraftServiceGetInfoRequest()
        return await self._stub.GetInfo(request, timeout=timeout_s, metadata=self._credential)

    def _received(self, message: draft_pb2.DraftResponse) -> None:
        self._received_s, self._asked_s = self._clock(), None
        self._listener.replied(self, message)

    async def _watch(self, call: Any) -> None:
        probe = lambda: self._get_info(_SILENCE_S)  # noqa: E731
        await watch_silence(self._silent_s, probe, every_s=_SILENCE_S, after_s=_SILENCE_S, most=_MAX_FAILED_PROBES)

    def _silent_s(self) -> float:
        """Raises StreamEnded for a link that is not used, and for a worker that no longer drafts."""
        now_s = self._clock()
        if not self.keys:
            if now_s - self._used_s >= _MAX_IDLE_S:
                self._listener.idle(self)
                raise StreamEnded("nothing is open there")
            return 0.0
        self._used_s = now_s
        if self._asked_s is not None and now_s - self._asked_s > _MAX_UNANSWERED_S:
            raise StreamEnded("it answers nothing of what it is asked")
        return now_s - self._received_s

    def _ended(self, why: Exception | None) -> None:
        if why is not None:
            self._listener.ended(self, Unavailable(f"draft {self.worker_id}: {problem_of(why)}", reason=self._reason))
