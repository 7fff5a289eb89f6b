"""Prompt lookup."""

from __future__ import annotations

import random

import pytest
from outrider.drafting.lookup.ngram import Match, NgramConfig, NgramIndex


def look(tokens: list[int], config: NgramConfig) -> Match | None:
    index = NgramIndex(tokens, config)
    index.update()
    return index.find()


def longest_by_search(tokens: list[int], config: NgramConfig) -> Match | None:
    """The definition: longest first, of equal ones the most recent."""
    for length in range(config.max_match, config.min_match - 1, -1):
        for start in range(len(tokens) - 1, length - 1, -1):
            if tokens[start - length : start] == tokens[-length:] and len(tokens) > length:
                return Match(start, length)
    return None


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_what_an_exhaustive_search_finds_however_the_tokens_arrive(seed: int) -> None:
    rng = random.Random(seed)
    config = NgramConfig(min_match=rng.choice([1, 2, 3]), max_match=6, max_candidates=1000)
    tokens: list[int] = []
    index = NgramIndex(tokens, config)
    for _ in range(60):
        tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        index.update()
        assert index.find() == longest_by_search(tokens, config)


def test_a_longer_match_wins_over_a_more_recent_one() -> None:
    tokens = [7, 1, 2, 3, 8, 9, 2, 3, 4, 7, 1, 2, 3]
    assert look(tokens, NgramConfig()) == Match(start=4, length=4)


def test_of_equal_matches_the_most_recent_wins() -> None:
    assert look([1, 2, 3, 1, 2, 4, 1, 2], NgramConfig()) == Match(start=5, length=2)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [3, 2, 1, 2]])
def test_nothing_is_found_where_nothing_repeats(tokens: list[int]) -> None:
    assert look(tokens, NgramConfig()) is None


def test_a_text_that_repeats_with_a_period_is_continued_beyond_its_end() -> None:
    text = [1, 2, 3, 1, 2]
    index = NgramIndex(text, NgramConfig())
    index.update()
    match = index.find()
    assert match is not None
    assert index.continuation(match, 8) == [3, 1, 2, 3, 1, 2, 3, 1]
