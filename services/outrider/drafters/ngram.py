"""A draft worker without a model: the lookup of n-grams that targets have too, from another process."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.config import DrafterKind
from outrider.drafters.interface import Drafter, DrafterInfo
from outrider.drafters.sequence import DraftSequence
from outrider.drafting.lookup.ngram import NAME, NgramConfig, NgramLookup
from outrider.drafting.lookup.source import looked_up
from outrider.drafting.tree import DraftTree
from outrider.speculation import VerificationMode


class NgramDrafter(Drafter):
    def __init__(self, vocab_size: int, max_context_len: int, config: NgramConfig | None = None) -> None:
        self.info = DrafterInfo(DrafterKind.NGRAM, vocab_size, max_context_len)
        self._config = config or NgramConfig()
        self._texts: dict[DraftSequence, NgramLookup] = {}

    def on_open(self, sequence: DraftSequence) -> None:
        self._texts[sequence] = NgramLookup(sequence.opening, self._config)

    def on_commit(self, sequence: DraftSequence, known_len: int) -> None:
        self._texts[sequence].extend(sequence.tokens[known_len:])

    def release(self, sequence: DraftSequence) -> None:
        """Keeps the index: it is cheap to extend and costly to rebuild."""

    def on_close(self, sequence: DraftSequence) -> None:
        del self._texts[sequence]

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        return [self._look_up(sequence) for sequence in sequences]

    def _look_up(self, sequence: DraftSequence) -> DraftTree | None:
        text, opening = self._texts[sequence], sequence.opening
        count = max(0, min(sequence.reach, self.info.max_context_len - sequence.committed_len))
        if (found := text.find(count)) is None:
            return None
        tokens, matched = found if count else ((), 0)
        ratio = opening.mode is VerificationMode.RATIO
        return looked_up(NAME, sequence.committed_len, tokens, matched, opening.stop_token_ids, ratio=ratio)
