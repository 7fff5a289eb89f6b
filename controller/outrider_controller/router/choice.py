"""Which worker a sequence goes to. Pure: candidates in, order out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    @property
    def full(self) -> bool:
        return 0 < self.max_sequences <= self.num_sequences

    @property
    def load(self) -> float:
        """Share of its limit in use; the bare number where it has none."""
        return self.num_sequences / self.max_sequences if self.max_sequences else float(self.num_sequences)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those with room, best first: longest cached prefix, then least load. Equal ones keep their order."""
    with_room = [c for c in candidates if not c.full]
    return sorted(with_room, key=lambda c: (c.num_waiting > 0, -c.matched_blocks, c.load))
