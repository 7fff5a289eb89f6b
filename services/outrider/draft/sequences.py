"""The sequences that are open on a draft worker, and what each of them waits for. Knows no drafter and no clock."""

from __future__ import annotations

from outrider.drafters import DraftSequence
from outrider.worker.events import SequenceKey


class OpenDraftSequences:
    """The open sequences, and the finished ones that only wait for their close."""

    def __init__(self) -> None:
        self._open: dict[SequenceKey, DraftSequence] = {}
        self._finished: set[SequenceKey] = set()
        # Sequences whose proposal is due; the longest waiting first.
        self._due: dict[SequenceKey, DraftSequence] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._finished)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._open or key in self._finished

    @property
    def keys(self) -> list[SequenceKey]:
        return [*self._open, *self._finished]

    @property
    def due(self) -> dict[SequenceKey, DraftSequence]:
        return dict(self._due)

    @property
    def num_running(self) -> int:
        """Sequences that are not paused."""
        return sum(1 for found in self._open.values() if found.limits.max_draft_tokens)

    def find(self, key: SequenceKey) -> DraftSequence | None:
        return self._open.get(key)

    def add(self, key: SequenceKey, found: DraftSequence, since_s: float) -> None:
        self._open[key] = found
        self.make_due(key, found, since_s)

    def make_due(self, key: SequenceKey, found: DraftSequence, since_s: float) -> None:
        """Marks a proposal as due, unless the sequence is paused."""
        if not found.limits.max_draft_tokens:
            return
        found.since_s = since_s
        # A waiting sequence keeps its place, or one that commits often would never catch up.
        self._due[key] = found

    def clear_due(self, key: SequenceKey) -> None:
        """No proposal is due, until the next commit at least."""
        self._due.pop(key, None)

    def finish(self, key: SequenceKey) -> None:
        """Keeps its id known until it is closed."""
        self._finished.add(key)

    def remove(self, key: SequenceKey) -> DraftSequence | None:
        """Forgets the key; returns its sequence if that had not finished."""
        self.clear_due(key)
        self._finished.discard(key)
        return self._open.pop(key, None)
