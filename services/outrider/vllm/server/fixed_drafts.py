"""Draft workers at fixed addresses: which of them drafts for a sequence, without a router.

A sequence goes to the worker with the fewest. One whose worker is lost gets another, or the same again when it is back.
Lives in an event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.drafting.source import DraftAssignment
from outrider.errors import OutriderError, Unavailable
from outrider.metadata import LeaseRecord
from outrider.rpc.channel import Connect
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from outrider.sequence.key import SequenceKey

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Time between two looks at the addresses."""
_INFO_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Reach:
    """How draft workers are reached, and what they must have in common with the target."""

    addresses: Sequence[str]
    connect: Connect
    credential: tuple[tuple[str, str], ...] = ()
    tokenizer_fingerprint: str = ""
    """Empty: not checked. Another tokenizer costs speed, and changes no text."""


@dataclass(slots=True)
class FixedDrafts:
    reach: Reach
    assign: Callable[[SequenceKey, DraftAssignment], None]
    workers: dict[str, LeaseRecord] = field(default_factory=dict)
    """Those that answer, by address."""
    _drafted_by: dict[SequenceKey, tuple[str, int]] = field(default_factory=dict)
    """Address of each open sequence's worker, empty while it has none, and the sequence's id there."""
    _refused: set[str] = field(default_factory=set)
    """Addresses that have been warned of."""
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def run(self) -> None:
        """Looks for workers until it is cancelled."""
        while True:
            missing = [address for address in self.reach.addresses if address not in self.workers]
            await asyncio.gather(*(self._look(address) for address in missing))
            for key in [key for key, (address, _) in self._drafted_by.items() if not address]:
                self.open(key)
            await asyncio.sleep(_LOOK_S)

    def open(self, key: SequenceKey) -> None:
        counts = Counter(address for address, _ in self._drafted_by.values())
        address, sequence_id = min(self.workers, key=counts.__getitem__, default=""), next(self._ids)
        self._drafted_by[key] = address, sequence_id
        if address:
            self.assign(key, DraftAssignment(self.workers[address].info.worker_id, address, sequence_id))

    def close(self, key: SequenceKey) -> None:
        """From now on it is not this module's."""
        self._drafted_by.pop(key, None)

    def clear(self) -> None:
        self._drafted_by.clear()

    def lost(self, sequence_id: int, problem: OutriderError) -> None:
        """The worker that drafted under this id does so no more."""
        key = next((key for key, (_, number) in self._drafted_by.items() if number == sequence_id), None)
        if key is None:
            return
        address, _ = self._drafted_by.pop(key)
        if not isinstance(problem, Unavailable):
            # The worker would refuse the sequence again.
            log.warning("the draft at %s has refused a request: %s", address, problem)
            return
        # Assigned again after the next look.
        self._drafted_by[key] = "", 0
        if self.workers.pop(address, None) is not None:
            log.warning("the draft at %s is lost: %s", address, problem)

    async def _look(self, address: str) -> None:
        try:
            info = await self._info(address)
            if (problem := self._problem(info)) is None:
                self.workers[address] = LeaseRecord(info, worker_pb2.WorkerLoad(), address, 0)
                self._refused.discard(address)
                return
        except (grpc.RpcError, ValueError) as error:
            problem = (error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)) or "no answer"
        if address not in self._refused:
            self._refused.add(address)
            log.warning("no drafts from %s: %s", address, problem)

    async def _info(self, address: str) -> worker_pb2.WorkerInfo:
        async with self.reach.connect(address) as channel:
            stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
            request, metadata = draft_pb2.DraftServiceGetInfoRequest(), self.reach.credential
            reply: draft_pb2.DraftServiceGetInfoResponse = await stub.GetInfo(
                request, timeout=_INFO_TIMEOUT_S, metadata=metadata
            )
        return reply.info

    def _problem(self, info: worker_pb2.WorkerInfo) -> str | None:
        wanted = self.reach.tokenizer_fingerprint
        if wanted and info.tokenizer_fingerprint not in ("", wanted):
            return "its tokenizer is not the target's"
        return None
