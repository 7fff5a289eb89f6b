"""Events from outside a worker of either kind. Applied in order, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from outrider.errors import OutriderError
from outrider.protocol.sequence_key import SequenceKey as SequenceKey


@dataclass(frozen=True, slots=True)
class Closed:
    key: SequenceKey


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A peer's stream has ended, and with it all sequences that it opened."""

    stream: int


@dataclass(frozen=True, slots=True)
class Refused:
    """An invalid message about one sequence, which ends the sequence."""

    key: SequenceKey
    error: Exception


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """From now on opens are refused."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """Sequences that still run are returned to their peers, which continue them elsewhere."""


E = TypeVar("E")


def translated(key: SequenceKey, translate: Callable[[], E]) -> E | Refused:
    """The event that `translate` makes of a message, or the message's refusal."""
    try:
        return translate()
    except OutriderError as error:
        return Refused(key, error)


WorkerEvent = Closed | StreamEnded | Refused | DrainStarted | DrainExpired
