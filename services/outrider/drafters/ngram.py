"""A drafter of n-grams alone, which needs no model. A client's predicted output is tried first."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.config import DrafterKind
from outrider.drafters.interface import Drafter, DrafterInfo
from outrider.drafters.sequence import DraftSequence
from outrider.drafting.lookup.ngram import NgramConfig, NgramIndex
from outrider.drafting.tree import DraftTree
from outrider.options.prediction import Prediction
from outrider.options.sampling import Q_TOTAL, DraftDistribution, VerificationMode

SOURCE = "ngram"
PREDICTION = "prediction"


class NgramDrafter(Drafter):
    """Drafts by prompt lookup alone."""

    def __init__(self, vocab_size: int, max_context_len: int, config: NgramConfig | None = None) -> None:
        self.info = DrafterInfo(DrafterKind.NGRAM, vocab_size, max_context_len)
        self._config = config or NgramConfig()
        self._indexes: dict[DraftSequence, NgramIndex] = {}
        self._predictions: dict[DraftSequence, Prediction] = {}

    def on_open(self, sequence: DraftSequence) -> None:
        index = NgramIndex(sequence.tokens, self._config)
        index.update()
        self._indexes[sequence] = index
        if sequence.opening.prediction:
            prediction = self._predictions[sequence] = Prediction(sequence.opening.prediction)
            prediction.extend(sequence.opening.committed)

    def on_commit(self, sequence: DraftSequence, known_len: int) -> None:
        self._indexes[sequence].update()
        if sequence in self._predictions:
            self._predictions[sequence].extend(sequence.tokens[known_len:])

    def release(self, sequence: DraftSequence) -> None:
        """Keeps the index: it is cheap to extend and costly to rebuild."""

    def on_close(self, sequence: DraftSequence) -> None:
        del self._indexes[sequence]
        self._predictions.pop(sequence, None)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        return [self.look_up(sequence) or DraftTree(sequence.committed_len, source=SOURCE) for sequence in sequences]

    def look_up(self, sequence: DraftSequence) -> DraftTree | None:
        """The client's predicted tokens, or those after the longest match; None without either."""
        count = min(sequence.reach, self.info.max_context_len - sequence.committed_len)
        if count <= 0:
            return None
        prediction = self._predictions.get(sequence)
        if prediction is not None and (upcoming := prediction.upcoming(count)):
            return _drafted(sequence, PREDICTION, list(upcoming), prediction.matched)
        index = self._indexes[sequence]
        match = index.find()
        if match is None:
            return None
        return _drafted(sequence, SOURCE, index.continuation(match, count), match.length)


def _drafted(sequence: DraftSequence, source: str, tokens: list[int], matched: int) -> DraftTree:
    tokens = _until_stop(tokens, sequence.opening.stop_token_ids)
    # In ratio mode: the token is deterministic, so q gives it probability 1.
    ratio = sequence.opening.mode is VerificationMode.RATIO
    q = tuple(DraftDistribution((token,), (Q_TOTAL,)) for token in tokens) if ratio else ()
    return DraftTree(sequence.committed_len, tuple(tokens), q=q, source=source, matched=matched)


def _until_stop(tokens: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for position, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: position + 1]
    return tokens
