"""Whose fault it is that a worker ended a sequence. Pure."""

from __future__ import annotations

from enum import Enum

from outrider.errors import Code


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
    """Not by the target that was to talk to it. What the two say to each other goes through the router then."""


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
