"""What can happen to the worker from outside, already translated and checked. Applied in order, between two rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.drafters import Opening


class SequenceKey(NamedTuple):
    """Sequence ids are made by routers, each for its own stream."""

    stream: int
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Opened:
    key: SequenceKey
    opening: Opening
    received_s: float
    """Monotonic."""


@dataclass(frozen=True, slots=True)
class Committed:
    key: SequenceKey
    base_len: int
    """Length before this commit."""
    token_ids: tuple[int, ...]
    finished: bool
    """The sequence has ended; only its close is still to come."""
    received_s: float


@dataclass(frozen=True, slots=True)
class Limited:
    key: SequenceKey
    max_draft_tokens: int
    run_ahead_tokens: int
    received_s: float
    num_alternatives: int = 0


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
class DrainStarted:
    """From now on nothing new is opened."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """What still runs is given back to its router, which goes on elsewhere."""


Event = Opened | Committed | Limited | Closed | StreamEnded | Refused | DrainStarted | DrainExpired
