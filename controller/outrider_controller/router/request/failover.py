"""The faults behind lost sequences, and from these: the workers that a request avoids, and when it is given up.

Pure: faults in, avoid-lists and "give up" out. The clock is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from outrider.errors import Code

from outrider_controller.router.config import FailoverConfig
from outrider_controller.router.tuning import BEGINNING

_MAX_PAIRS = 1024
_MAX_BACKOFF_S = 60.0

TargetKey = tuple[str, int]
"""A target over one connection: its worker id, and the number of the connection."""


class Fault(Enum):
    """Why a target lost a sequence."""

    REQUEST = "request"
    """Every target would refuse it: the error goes to the client."""
    WORKER = "worker"
    """Another target may succeed, but few are tried."""
    CONNECTION = "connection"
    """Its stream broke: the request may have crashed it, or only the network failed."""
    FULL = "full"
    """The worker has no room at present."""
    LEAVING = "leaving"
    """The worker is draining; nothing failed."""


class Loss(Enum):
    """Why a draft lost a sequence. The values label a metric."""

    WORKER = "draft_lost"
    ERROR = "draft_error"
    MALFORMED = "draft_malformed"
    UNREACHABLE = "draft_unreachable"
    """From this target: neither the draft nor the request is suspected."""


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
    config: FailoverConfig
    revision: str
    """Of the target's model. A failover stays on it, or on the same weights if no other target has it."""
    failed_targets: set[TargetKey] = field(default_factory=set)
    """Targets that failed with this request. Tried again only where there is no other."""
    leaving_targets: set[TargetKey] = field(default_factory=set)
    full_targets: set[TargetKey] = field(default_factory=set)
    """Targets that had no room. Tried again after a while."""
    avoided_drafts: set[str] = field(default_factory=set)
    target_failures: int = 0
    """Targets that reported a failure, or sent an impossible reply."""
    lost_connections: int = 0
    """Targets whose stream broke."""
    draft_failures: int = 0
    rounds_here: int = 0
    """Rounds that the present target has committed."""
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
        """So many targets failed with this request that the request must be the cause."""
        config = self.config
        return (
            self.target_failures >= config.max_target_failures or self.lost_connections >= config.max_lost_connections
        )

    @property
    def suspects_network(self) -> bool:
        """The router's own network may be the cause: then all connections break at once, but are noticed one by one."""
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
        """A target that commits enough rounds shows that the request is not the cause."""
        self.rounds_here += 1
        if self.rounds_here == BEGINNING:
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
        # Without a connection the request is not suspected; a broken one is weak evidence against the draft.
        if loss not in (Loss.UNREACHABLE, Loss.WORKER):
            self.avoided_drafts.add(worker_id)
        self.draft_failures += loss is not Loss.UNREACHABLE


@dataclass(slots=True)
class UnreachablePairs:
    """Pairs of target and draft whose connection broke or was never made: they are not paired again for a while."""

    first_backoff_s: float
    """Doubled with each failure that soon follows the previous one."""
    _pairs: OrderedDict[tuple[str, str], tuple[float, float]] = field(default_factory=OrderedDict)
    """By the worker ids of target and draft: the backoff in seconds, and until when it lasts."""

    def failed(self, target_id: str, draft_id: str, now_s: float) -> None:
        backoff_s, until_s = self._pairs.pop((target_id, draft_id), (0.0, now_s))
        if now_s < until_s:
            # The same break ends many sequences and counts once.
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
