"""Whose fault it is that a worker ended a sequence, and what is avoided for that. Pure: the clock is an argument."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from outrider.errors import Code

_MAX_PAIRS = 1024
_MAX_BACKOFF_S = 60.0


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


_REQUEST = {
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.FAILED_PRECONDITION,
    Code.UNIMPLEMENTED,
}


def fault_of(code: Code) -> Fault:
    """From the code of a target's SequenceError."""
    if code in _REQUEST:
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
