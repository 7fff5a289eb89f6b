"""Which worker a sequence goes to. Pure: candidates in, order out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of a worker's limit: loads that differ by less are about the same.
_ALIKE = 0.125


@dataclass(frozen=True, slots=True)
class Candidate:
    """One live worker that could serve the sequence."""

    worker_id: str
    matched_blocks: int
    """Leading blocks of the prompt found in its prefix cache."""
    num_sequences: int
    """The larger of what it last reported and what this router has open there."""
    max_sequences: int
    """0 means it named no limit."""
    num_waiting: int = 0
    num_together: int = 0
    """Sequences that it drafts for the target in question."""

    @property
    def full(self) -> bool:
        return 0 < self.max_sequences <= self.num_sequences

    @property
    def load(self) -> float:
        """Share of its limit in use; the bare number where it has none."""
        return self.num_sequences / self.max_sequences if self.max_sequences else float(self.num_sequences)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those with room, best first: longest cached prefix, then least load. Equal ones keep their order.

    Of drafts that are about as busy as the least busy one, that which drafts most for the same target: what a step
    commits then goes to one draft in one message and comes back in one, as one batch.
    """
    with_room = [c for c in candidates if not c.full]
    busy = min((c.load for c in with_room), default=0.0) + _ALIKE

    def order(c: Candidate) -> tuple[bool, int, bool, int, float]:
        return c.num_waiting > 0, -c.matched_blocks, c.load > busy, -c.num_together, c.load

    return sorted(with_room, key=order)
