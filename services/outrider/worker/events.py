"""What can happen to a worker of either kind from outside. Applied in order, between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SequenceKey(NamedTuple):
    """Sequence ids are made by the peers, each for its own stream."""

    stream: int
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Closed:
    key: SequenceKey


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A peer is gone, and with it all that it opened."""

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
    """What still runs is given back to its peer, which goes on elsewhere."""


WorkerEvent = Closed | StreamEnded | Refused | DrainStarted | DrainExpired
