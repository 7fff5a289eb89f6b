"""Prompt lookup: tokens that followed an n-gram last time are likely to follow it again.

Saxena 2023 (prompt lookup decoding). It needs no model, is cheap, and is strong where the answer quotes the prompt or
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.drafting.lookup.source import REACH, Found, LookupDrafts
from outrider.drafting.source import DraftSource, register

NAME = "ngram"
# Tokens indexed at once: a long prompt is taken in over several steps, during its prefill.
_MAX_INDEXED = 1024


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """How a repetition is recognised."""

    min_match: int = 2
    """Shortest run of tokens whose earlier occurrence is continued.

    One of a single token is chance more often than quotation, and a model does better there; from two on n-grams win,
    measured on Spec-Bench: docs/benchmarks.md."""
    max_match: int = 8
    """A run this long is not compared further: the most recent one wins."""
    max_candidates: int = 8
    """Earlier occurrences of the shortest run that are looked at, most recent first."""


class Match(NamedTuple):
    """An earlier occurrence of the last `length` tokens, and the position that followed it."""

    start: int
    length: int


class NgramIndex:
    """Earlier occurrences of every run of `min_match` tokens, in chains from the most recent back (as in LZ77).

    Indexes a list of tokens that only grows. One table entry per token: O(1) amortised, whatever max_match is.
    """

    def __init__(self, tokens: Sequence[int], config: NgramConfig) -> None:
        self._tokens = tokens
        self._config = config
        self._latest: dict[tuple[int, ...], int] = {}
        # _previous[i - min_match]: the occurrence before the one that position i follows, or -1.
        self._previous: list[int] = []

    def update(self, most: int | None = None) -> bool:
        """Takes in tokens appended since the last call, at most so many; returns whether those are all."""
        size, tokens, latest, previous = self._config.min_match, self._tokens, self._latest, self._previous
        # An entry holds the position after its run, which for the run at the very end is still to come.
        start, end = len(previous) + size, len(tokens) + 1
        stop = end if most is None else min(end, start + most)
        for position in range(start, stop):
            run = tuple(tokens[position - size : position])
            previous.append(latest.get(run, -1))
            latest[run] = position
        return stop >= end

    def find(self) -> Match | None:
        """The longest earlier occurrence of the list's end, up to max_match; of equal ones the most recent. All tokens
        must be taken in."""
        config, tokens, previous = self._config, self._tokens, self._previous
        size, most = config.min_match, config.max_match
        position = previous[-1] if previous else -1
        best, longest = -1, size - 1
        # Inline, because this runs between steps for each sequence: a call costs more than most comparisons.
        for _ in range(config.max_candidates):
            if position < 0 or longest == most:
                break
            # Only one that also has the token before the best match so far can be longer.
            if position > longest and tokens[position - 1 - longest] == tokens[-1 - longest]:
                length, end = size, min(most, position)
                while length < end and tokens[position - 1 - length] == tokens[-1 - length]:
                    length += 1
                if length > longest:
                    best, longest = position, length
            position = previous[position - size]
        return None if best < 0 else Match(best, longest)

    def continuation(self, match: Match, count: int) -> Sequence[int]:
        """`count` tokens from where the match ended. Past the end of the list it repeats with the match's own
        period."""
        tokens, start = self._tokens, match.start
        if start + count <= len(tokens):
            return tokens[start : start + count]
        period = len(tokens) - start
        return [tokens[start + offset % period] for offset in range(count)]


@register(NAME)
def ngrams() -> DraftSource:
    return LookupDrafts(NAME, lambda spec, tokens: NgramLookup(tokens))


class NgramLookup:
    """The index of one sequence, and its last match: as long as commits follow that, it is not searched anew."""

    def __init__(self, tokens: Sequence[int], config: NgramConfig | None = None) -> None:
        self._tokens = tokens
        self._index = NgramIndex(tokens, config or NgramConfig())
        self._match: Match | None = None
        self._end = len(tokens)
        """Tokens at the last lookup."""

    def find(self, count: int) -> Found | None:
        """The tokens after the longest match. None while the prompt is being taken in."""
        if not self._index.update(_MAX_INDEXED):
            return None
        self._match = match = self._followed() or self._index.find()
        if match is None:
            return (), 0
        return self._index.continuation(match, min(count, REACH * match.length)), match.length

    def _followed(self) -> Match | None:
        """The last match, if what was committed since went on as it did."""
        match, end, self._end = self._match, self._end, len(self._tokens)
        count = self._end - end
        if match is None or self._tokens[match.start : match.start + count] != self._tokens[end:]:
            return None
        return Match(match.start + count, match.length + count)
