"""The sequences that are open on a draft worker, and what each of them waits for. Knows no drafter and no clock."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.draft.events import Proposed
from outrider.drafters import DraftSequence
from outrider.tree import DraftTree
from outrider.worker.events import SequenceKey


@dataclass(slots=True, eq=False)
class OpenSequence:
    """One sequence that has not finished."""

    key: SequenceKey
    sequence: DraftSequence
    since_s: float = 0.0
    """Monotonic seconds: when the commit or opening came in that the next proposal answers."""
    compute_s: float = 0.0
    """Seconds of the rounds it was part of since its last proposal."""
    share_s: float = 0.0
    """Its share in seconds of all rounds since its last proposal."""

    def proposed(self, tree: DraftTree) -> Proposed:
        """A proposal of this sequence. It takes along `compute_s` and `share_s`, which start anew."""
        spec = self.sequence.spec
        compute_s, self.compute_s = self.compute_s, 0.0
        share_s, self.share_s = self.share_s, 0.0
        about = self.key, self.sequence.epoch, tree, spec.params, spec.mode
        return Proposed(*about, since_s=self.since_s, compute_s=compute_s, share_s=share_s)


class OpenDraftSequences:
    """The open sequences, and the finished ones that only wait for their close."""

    def __init__(self) -> None:
        self._open: dict[SequenceKey, OpenSequence] = {}
        self._finished: set[SequenceKey] = set()
        # Sequences whose proposal is due; the longest waiting first.
        self._due: dict[SequenceKey, OpenSequence] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._finished)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._open or key in self._finished

    @property
    def keys(self) -> list[SequenceKey]:
        return [*self._open, *self._finished]

    @property
    def due(self) -> list[OpenSequence]:
        return list(self._due.values())

    @property
    def num_running(self) -> int:
        """Sequences that are not paused."""
        return sum(1 for found in self._open.values() if found.sequence.limits.max_draft_tokens)

    def find(self, key: SequenceKey) -> OpenSequence | None:
        return self._open.get(key)

    def add(self, found: OpenSequence) -> None:
        self._open[found.key] = found

    def make_due(self, found: OpenSequence, since_s: float) -> None:
        """Marks a proposal as due, unless the sequence is paused."""
        if not found.sequence.limits.max_draft_tokens:
            return
        found.since_s = since_s
        # A waiting sequence keeps its place, or one that commits often would never catch up.
        self._due[found.key] = found

    def clear_due(self, key: SequenceKey) -> None:
        """No proposal is due, until the next commit at least."""
        self._due.pop(key, None)

    def finish(self, key: SequenceKey) -> None:
        """Keeps its id known until it is closed."""
        self._finished.add(key)

    def remove(self, key: SequenceKey) -> OpenSequence | None:
        """Forgets the key; returns its sequence if that had not finished."""
        self.clear_due(key)
        self._finished.discard(key)
        return self._open.pop(key, None)
