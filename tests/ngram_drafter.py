"""A drafter without a model, for tests of what is around drafters: its proposals can be told in advance."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters import Drafter, DraftSequence
from outrider.drafting.lookup.ngram import NgramLookup
from outrider.engine import ModelInfo
from outrider.tree import DraftTree


class NgramDrafter(Drafter):
    """Continues the last occurrence of the text's end."""

    def __init__(self, vocab_size: int = 384, max_context_len: int = 512) -> None:
        self.info = ModelInfo(vocab_size, max_context_len)
        self._texts: dict[DraftSequence, NgramLookup] = {}

    def on_open(self, sequence: DraftSequence) -> None:
        self._texts[sequence] = NgramLookup(sequence.tokens)

    def on_commit(self, sequence: DraftSequence, known_len: int) -> None: ...

    def release(self, sequence: DraftSequence) -> None: ...

    def on_close(self, sequence: DraftSequence) -> None:
        del self._texts[sequence]

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        return [self._look_up(sequence) for sequence in sequences]

    def _look_up(self, sequence: DraftSequence) -> DraftTree:
        tokens, matched = self._texts[sequence].find(sequence.room) or ((), 0)
        return DraftTree(sequence.committed_len, tuple(tokens), source="ngram", matched=matched)
