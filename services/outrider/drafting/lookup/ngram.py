"""Prompt lookup: tokens that followed an n-gram last time are likely to follow it again.

Saxena 2023 (prompt lookup decoding). It needs no model, is cheap, and is strong where the answer quotes the prompt or
itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """How a repetition is recognised."""

    min_match: int = 2
    """Shortest run of tokens whose earlier occurrence is continued.

    One of a single token is chance more often than quotation, and a model does better there; from two on n-grams win,
    measured on Spec-Bench: docs/benchmarks.md."""
    max_match: int = 8
    """A run this long is not compared further: the most recent one wins."""
    max_candidates: int = 128
    """Earlier occurrences of the shortest run that are looked at, most recent first."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(f"min_match: {self.min_match} is not between 1 and max_match ({self.max_match})")
        if self.max_candidates < 1:
            raise ValueError("max_candidates: must be at least 1")


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
