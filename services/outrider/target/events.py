"""What can happen to the worker from outside, already translated and checked. Applied in order, between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.target.drafts import OfferedDraft
from outrider.target.opening import Opening, Speculation
from outrider.target.sequence import SequenceKey


@dataclass(frozen=True, slots=True)
class Opened:
    key: SequenceKey
    opening: Opening
    received_s: float
    """Monotonic."""


@dataclass(frozen=True, slots=True)
class Offered:
    key: SequenceKey
    draft: OfferedDraft


@dataclass(frozen=True, slots=True)
class Adjusted:
    key: SequenceKey
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class Closed:
    key: SequenceKey


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A router is gone, and with it all that it opened."""

    stream: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A message about one sequence that cannot be followed: it ends the sequence."""

    key: SequenceKey
    error: Exception


@dataclass(frozen=True, slots=True)
class DraftRefused:
    """A malformed draft. The sequence goes on without it."""

    key: SequenceKey
    error: Exception


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """From now on nothing new is opened."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """What still runs is given back to its router, which goes on elsewhere."""


Event = Opened | Offered | Adjusted | Closed | StreamEnded | Refused | DraftRefused | DrainStarted | DrainExpired
