"""Whose fault it is that a worker ended a sequence, and what follows: whom a request avoids, and when it is given up.

Pure: faults in, avoid-lists and "give up" out. The clock is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from outrider.errors import Code

from outrider_controller.router.config import FailoverConfig

_MAX_PAIRS = 1024
_MAX_BACKOFF_S = 60.0
# A request that breaks a target at every few tokens must not go through all of them.
_ROUNDS_TO_CLEAR = 16

TargetKey = tuple[str, int]
"""A target over one connection: its worker id, and which of the connections to it."""


class Fault(Enum):
    """Why a target lost a sequence."""

    REQUEST = "request"
    """Every target would say the same: the client hears it."""
    WORKER = "worker"
    """Another target may do better, but not many will be tried."""
    CONNECTION = "connection"
    """Its stream broke: it may have died of the request, or only the way to it."""
    FULL = "full"
    """The worker has no room now."""
    LEAVING = "leaving"
    """The worker is draining: nobody failed."""


class Loss(Enum):
    """Why a draft lost a sequence. The values label a metric."""

    WORKER = "draft_lost"
    ERROR = "draft_error"
    MALFORMED = "draft_malformed"
    UNREACHABLE = "draft_unreachable"
    """For this target: nothing is known against the draft, or the request."""


_REQUEST_FAULTS = {
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.FAILED_PRECONDITION,
    Code.UNIMPLEMENTED,
}


def fault_of(code: Code) -> Fault:
    """From the code of a target's SequenceError."""
    if code in _REQUEST_FAULTS:
        return Fault.REQUEST
    if code is Code.RESOURCE_EXHAUSTED:
        return Fault.FULL
    if code is Code.UNAVAILABLE:
        return Fault.LEAVING
    return Fault.WORKER


def loss_of(reason: str, *, names_field: bool) -> Loss:
    """From a target's SequenceError about a draft."""
    if reason == "DRAFT_UNREACHABLE":
        return Loss.UNREACHABLE
    if reason == "DRAFT_GONE":
        return Loss.WORKER
    return Loss.MALFORMED if names_field else Loss.ERROR


@dataclass(slots=True)
class FailoverState:
    """How one request has fared on its workers."""

    config: FailoverConfig
    revision: str
    """Of the target's model: a failover stays on it, or on its weights where no other target has it."""
    failed_targets: set[TargetKey] = field(default_factory=set)
    """Targets that failed with this request. Asked again only where there is no other."""
    leaving_targets: set[TargetKey] = field(default_factory=set)
    full_targets: set[TargetKey] = field(default_factory=set)
    """Targets that had no room. Asked again after a while."""
    avoided_drafts: set[str] = field(default_factory=set)
    target_failures: int = 0
    """Targets that reported that they failed, or what cannot be true."""
    lost_connections: int = 0
    """Targets whose stream broke."""
    draft_failures: int = 0
    rounds_here: int = 0
    """That the target it is on has committed."""
    num_targets: int = 0
    num_drafts: int = 0

    @property
    def excluded_targets(self) -> set[TargetKey]:
        return self.leaving_targets | self.full_targets

    @property
    def num_failures(self) -> int:
        return self.target_failures + self.lost_connections

    @property
    def gives_up(self) -> bool:
        """So many targets failed with this request that it must be the cause."""
        config = self.config
        return (
            self.target_failures >= config.max_target_failures or self.lost_connections >= config.max_lost_connections
        )

    @property
    def suspects_network(self) -> bool:
        """It may be the router's own network: then all connections break at once, but are not noticed at once."""
        return self.lost_connections > 1

    @property
    def may_draft(self) -> bool:
        return self.draft_failures < self.config.max_draft_failures

    def target_opened(self) -> None:
        self.num_targets += 1
        self.rounds_here = 0

    def draft_opened(self) -> None:
        self.num_drafts += 1

    def round_committed(self) -> None:
        """A target that carries the request so far shows that it is not the cause."""
        self.rounds_here += 1
        if self.rounds_here == _ROUNDS_TO_CLEAR:
            self.target_failures = self.lost_connections = 0

    def target_lost(self, key: TargetKey, fault: Fault) -> None:
        if fault is Fault.FULL:
            self.full_targets.add(key)
        elif fault is Fault.LEAVING:
            self.leaving_targets.add(key)
        else:
            self.failed_targets.add(key)
        self.target_failures += fault is Fault.WORKER
        self.lost_connections += fault is Fault.CONNECTION

    def draft_lost(self, worker_id: str, loss: Loss) -> None:
        # Where there was no connection, nothing is known against the request; where it broke, little against the draft.
        if loss not in (Loss.UNREACHABLE, Loss.WORKER):
            self.avoided_drafts.add(worker_id)
        self.draft_failures += loss is not Loss.UNREACHABLE


@dataclass(slots=True)
class UnreachablePairs:
    """Targets that lost, or never had, their connection to a draft: they are not given it again for a while."""

    first_backoff_s: float
    """Doubled with each failure that follows soon after the one before."""
    _pairs: OrderedDict[tuple[str, str], tuple[float, float]] = field(default_factory=OrderedDict)
    """By the worker ids of target and draft: how long it is avoided, and until when."""

    def failed(self, target_id: str, draft_id: str, now_s: float) -> None:
        backoff_s, until_s = self._pairs.pop((target_id, draft_id), (0.0, now_s))
        if now_s < until_s:
            # One of many sequences that the same break ended.
            self._pairs[target_id, draft_id] = backoff_s, until_s
            return
        again = backoff_s and now_s < until_s + _MAX_BACKOFF_S
        backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S) if again else self.first_backoff_s
        self._pairs[target_id, draft_id] = backoff_s, now_s + backoff_s
        if len(self._pairs) > _MAX_PAIRS:
            self._pairs.popitem(last=False)

    def avoids(self, target_id: str, draft_id: str, now_s: float) -> bool:
        _, until_s = self._pairs.get((target_id, draft_id), (0.0, now_s))
        return now_s < until_s
