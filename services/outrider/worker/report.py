"""What a worker of either kind has to say after a step, before it becomes messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.worker.events import SequenceKey


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence that ended by a fault, or a message that was refused."""

    key: SequenceKey
    error: Exception


@dataclass(slots=True, kw_only=True)
class WorkerReport:
    """One turn of the loop: a step, or only what was found before one. May say nothing."""

    failures: list[Failed] = field(default_factory=list)
    prefix_added: list[bytes] = field(default_factory=list)
    """Hashes of the blocks that became findable in the prefix cache."""
    prefix_removed: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """How the worker fares, as of the last step."""

    num_running: int = 0
    """Sequences that have a place: on a draft, those that speculate."""
    num_waiting: int = 0
    """Sequences that wait for a place: on a draft, for a proposal, as they are catching up."""
    num_free_blocks: int = 0
    num_sequences: int = 0
    """All that are open."""
    draining: bool = False
    prefill_token_ns: int = 0
    row_ns: int = 0
    """What one more token of a prompt, and one more row, add to a step's time. 0 while unknown."""

    @property
    def drained(self) -> bool:
        """Nothing is open, and nothing will be."""
        return self.draining and not self.num_sequences
