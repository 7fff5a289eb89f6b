"""Prompt lookup: tokens that followed an n-gram last time are likely to follow it again.

Saxena 2023 (prompt lookup decoding). It needs no model, is cheap, and is strong where the answer quotes the prompt or
itself. A client's predicted output is tried first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.config import DrafterKind, NgramConfig
from outrider.drafters.interface import Drafter, DrafterInfo
from outrider.drafters.sequence import Drafted, DraftSequence
from outrider.options.prediction import Prediction
from outrider.speculation import Q_TOTAL, DraftDistribution, VerificationMode

SOURCE = "ngram"
PREDICTION = "prediction"


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the last `length` tokens, and the position that followed it."""

    start: int
    length: int


class NgramIndex:
    """Earlier occurrences of every run of `min_match` tokens, in chains from the most recent back (as in LZ77).

    Indexes a list of tokens that only grows. One table entry per token: O(1) amortised, whatever max_match is.
    """

    def __init__(self, tokens: list[int], config: NgramConfig) -> None:
        self._tokens = tokens
        self._config = config
        self._latest: dict[tuple[int, ...], int] = {}
        # _previous[i - min_match]: the occurrence before the one that position i follows, or -1.
        self._previous: list[int] = []

    def update(self) -> None:
        """Takes in the tokens appended since the last call."""
        size, tokens = self._config.min_match, self._tokens
        # An entry holds the position after its run, so the run at the very end is added later.
        for position in range(len(self._previous) + size, len(tokens)):
            run = tuple(tokens[position - size : position])
            self._previous.append(self._latest.get(run, -1))
            self._latest[run] = position

    def find(self) -> Match | None:
        """The longest earlier occurrence of the list's end, up to max_match; of equal ones the most recent."""
        size, tokens = self._config.min_match, self._tokens
        position = self._latest.get(tuple(tokens[-size:]), -1)
        best: Match | None = None
        for _ in range(self._config.max_candidates):
            if position < 0:
                break
            length = self._common(position)
            if best is None or length > best.length:
                best = Match(position, length)
            if length == self._config.max_match:
                break
            position = self._previous[position - size]
        return best

    def continuation(self, match: Match, count: int) -> list[int]:
        """`count` tokens from where the match ended. Past the end of the list it repeats with the match's own
        period."""
        period = len(self._tokens) - match.start
        return [self._tokens[match.start + offset % period] for offset in range(count)]

    def _common(self, position: int) -> int:
        """How many tokens before `position` equal the list's last ones; at least min_match are known to."""
        tokens, size = self._tokens, self._config.min_match
        most = min(self._config.max_match, position)
        while size < most and tokens[position - 1 - size] == tokens[-1 - size]:
            size += 1
        return size


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

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Drafted | None]:
        return [self.look_up(sequence) or Drafted(SOURCE) for sequence in sequences]

    def look_up(self, sequence: DraftSequence) -> Drafted | None:
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


def _drafted(sequence: DraftSequence, source: str, tokens: list[int], matched: int) -> Drafted:
    tokens = _until_stop(tokens, sequence.opening.stop_token_ids)
    if sequence.opening.mode is VerificationMode.RATIO:
        # The token is deterministic, so q gives it probability 1.
        point = [DraftDistribution((token,), (Q_TOTAL,)) for token in tokens]
        return Drafted(source, tokens, q=point, matched=matched)
    return Drafted(source, tokens, matched=matched)


def _until_stop(tokens: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for position, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: position + 1]
    return tokens
