"""What a worker of either kind reports after a step, before it becomes messages."""

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
    """All open sequences."""
    draining: bool = False
    prefill_token_ns: int = 0
    row_ns: int = 0
    """Nanoseconds that one more prompt token, and one more row, add to a step. 0 while unknown."""

    @property
    def drained(self) -> bool:
        """Whether nothing is open, and nothing will be."""
        return self.draining and not self.num_sequences
