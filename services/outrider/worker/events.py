"""What reaches a worker of either kind, applied in order between two steps, and what it reports after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.errors import OutriderError
from outrider.sequence.key import SequenceKey as SequenceKey
from outrider.sequence.spec import SequenceSpec


@dataclass(frozen=True, slots=True)
class Opened:
    key: SequenceKey
    spec: SequenceSpec
    received_s: float
    """Monotonic."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and committed output: the one list of them in this process. Only the engine extends it; others read, in
    any thread, as far as they have been told of commits. Given where the engine has it already."""

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens.extend(self.spec.tokens)


@dataclass(frozen=True, slots=True)
class Closed:
    key: SequenceKey


@dataclass(frozen=True, slots=True)
class PeerStreamEnded:
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


WorkerEvent = Opened | Closed | PeerStreamEnded | Refused | DrainStarted | DrainExpired


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence that ended by a fault, or a message that was refused."""

    key: SequenceKey
    error: Exception


@dataclass(slots=True, kw_only=True)
class WorkerReport:
    """One turn of the loop: a step, or only what was found before one. May be empty."""

    failures: list[Failed] = field(default_factory=list)
    prefix_added: list[bytes] = field(default_factory=list)
    """Hashes of the blocks that became findable in the prefix cache."""
    prefix_removed: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """The worker's load after the last step."""

    num_running: int = 0
    """On a target, sequences that hold KV; on a draft, those that are not paused."""
    num_waiting: int = 0
    """On a target, sequences that wait for KV; on a draft, those that catch up before their next proposal."""
    num_free_blocks: int = 0
    num_sequences: int = 0
    draining: bool = False
    prefill_token_ns: int = 0
    row_ns: int = 0
    """Nanoseconds that one more prompt token, and one more row, add to a step. 0 while unknown."""

    @property
    def drained(self) -> bool:
        """Whether nothing is open, and nothing will be."""
        return self.draining and not self.num_sequences
