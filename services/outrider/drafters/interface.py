"""The interface of all drafters, and the code they share: opening, committing, limits, epochs.

A subclass defines how it drafts (`propose`) and what it keeps per sequence (`on_open`, `on_commit`, `release`,
`on_close`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from outrider.drafters.sequence import DraftSequence
from outrider.drafting.source import Features
from outrider.engine import ModelInfo
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree


class Drafter(ABC):
    """Proposes continuations of many sequences. Owned by one thread."""

    info: ModelInfo
    """What a caller needs to know before it opens a sequence."""

    def open(self, spec: SequenceSpec) -> DraftSequence:
        """Raises InvalidRequest for what the drafter cannot read."""
        sequence = DraftSequence.start(spec)
        self.on_open(sequence)
        return sequence

    def commit(self, sequence: DraftSequence, base_len: int, token_ids: Sequence[int]) -> None:
        """Appends committed tokens. Raises CommitMismatch, with nothing changed, and InvalidRequest for tokens that the
        drafter cannot read: then the sequence is over."""
        known_len = sequence.committed_len
        sequence.commit(base_len, token_ids)
        self.on_commit(sequence, known_len)

    def see(self, sequence: DraftSequence, features: Features) -> bool:
        """What the target sends of its hidden states, to those that ask for it; before the commit that gives the token
        after them. Returns whether a proposal needs no such commit."""
        return False

    def set_limits(self, sequence: DraftSequence, limits: Speculation) -> None:
        """Sets the limits from now on. A sequence that may draft nothing is paused, and then holds no KV blocks."""
        sequence.limits = limits
        if not limits.max_draft_tokens:
            sequence.drop_guess()
            self.release(sequence)

    def close(self, sequence: DraftSequence) -> None:
        self.on_close(sequence)

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        """One proposal per sequence, made in one batched round. It repeats what is still valid of the last one.

        None: the sequence is still catching up. Each further call brings it forward by a bounded step.
        """
        proposals = self.propose(sequences)
        for sequence, drafted in zip(sequences, proposals, strict=True):
            if drafted is not None:
                sequence.adopt(drafted)
        return proposals

    def check(self) -> None:
        """Raises what the drafter's model raises, whatever it is given."""
        return

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that could be handed out now; 0 without a KV cache."""
        return 0

    def take_prefix_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Block hashes (added to, removed from) the prefix cache since the last call."""
        return [], []

    @abstractmethod
    def on_open(self, sequence: DraftSequence) -> None:
        """The sequence begins."""

    @abstractmethod
    def on_commit(self, sequence: DraftSequence, known_len: int) -> None:
        """The sequence's committed tokens have grown beyond `known_len`."""

    @abstractmethod
    def release(self, sequence: DraftSequence) -> None:
        """The sequence will not draft for a while: release what is scarce."""

    @abstractmethod
    def on_close(self, sequence: DraftSequence) -> None:
        """The sequence has ended: release everything."""

    @abstractmethod
    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        """As `draft`, at most `sequence.room` tokens each. Changes no sequence."""
