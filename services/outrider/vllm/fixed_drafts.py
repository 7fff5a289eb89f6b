"""Draft workers at fixed addresses: which of them drafts for a sequence, without a router.

A sequence goes to the worker with the fewest. One whose worker is lost gets another, or the same again when it is back.
Lives in an event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.drafting.pool import DraftLeases, PoolDrafts, PoolListener, Vocabulary
from outrider.drafting.source import CloseReason, DraftAssignment, Opening
from outrider.errors import OutriderError, Unavailable
from outrider.metadata import LeaseRecord
from outrider.protocol.sequence_key import SequenceKey
from outrider.rpc.channel import Connect
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, worker_pb2

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Time between two looks at the addresses."""
_INFO_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Reach:
    """How draft workers are reached, and what they must have in common with the target."""

    addresses: Sequence[str]
    vocabulary: Vocabulary
    connect: Connect
    credential: tuple[tuple[str, str], ...] = ()
    tokenizer_fingerprint: str = ""
    """Empty: not checked. Another tokenizer costs speed, and changes no text."""


@dataclass(slots=True)
class FixedDrafts:
    reach: Reach
    pool: PoolDrafts = field(init=False)
    _workers: dict[str, LeaseRecord] = field(default_factory=dict)
    """Those that answer, by address."""
    _drafted_by: dict[SequenceKey, str] = field(default_factory=dict)
    """Address of each open sequence's worker; empty while it has none."""
    _refused: set[str] = field(default_factory=set)
    """Addresses that have been warned of."""
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        leases, reach = DraftLeases(self._leases, time.monotonic), self.reach
        listener = PoolListener(lost=self._lost)
        self.pool = PoolDrafts(reach.vocabulary, time.monotonic, leases, listener, reach.connect, reach.credential)

    async def run(self) -> None:
        """Looks for workers until it is cancelled."""
        try:
            while True:
                missing = [address for address in self.reach.addresses if address not in self._workers]
                await asyncio.gather(*(self._look(address) for address in missing))
                for key in [key for key, address in self._drafted_by.items() if not address]:
                    self._assign(key)
                await asyncio.sleep(_LOOK_S)
        finally:
            await self.pool.links.stop()

    def open(self, key: SequenceKey, opening: Opening) -> None:
        self.pool.open(key, opening)
        self._assign(key)

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        self.pool.commit(key, base_len, tokens)

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        self._drafted_by.pop(key, None)
        self.pool.close(key, reason)

    def _assign(self, key: SequenceKey) -> None:
        counts = Counter(self._drafted_by.values())
        address = min(self._workers, key=counts.__getitem__, default="")
        self._drafted_by[key] = address
        if address:
            worker_id = self._workers[address].info.worker_id
            self.pool.assign(key, DraftAssignment(worker_id, address, next(self._ids)))

    def _lost(self, key: SequenceKey, sequence_id: int, problem: OutriderError) -> None:
        if (address := self._drafted_by.pop(key, None)) is None:
            return
        if not isinstance(problem, Unavailable):
            # The worker would refuse the sequence again.
            log.warning("the draft at %s has refused a request: %s", address, problem)
            return
        # Assigned again after the next look.
        self._drafted_by[key] = ""
        if self._workers.pop(address, None) is not None:
            log.warning("the draft at %s is lost: %s", address, problem)

    async def _leases(self) -> Iterable[LeaseRecord]:
        return list(self._workers.values())

    async def _look(self, address: str) -> None:
        try:
            info = await self._info(address)
            if (problem := self._problem(info)) is None:
                self._workers[address] = LeaseRecord(info, worker_pb2.WorkerLoad(), address, 0)
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
