"""Lookups as sources of drafts: what they propose after each commit, and what they cost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from outrider.drafting.lookup import NAMES
from outrider.drafting.lookup.ngram import NgramLookup, ngrams
from outrider.drafting.lookup.prediction import predictions
from outrider.drafting.source import CloseReason, make_sources, register
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree

from tests.told import Told

KEY, OTHER = SequenceKey(1, 1), SequenceKey(1, 2)


def opening(prompt: Sequence[int], count: int = 4, **fields: object) -> SequenceSpec:
    given = {"params": SamplingParams(temperature=0), "mode": VerificationMode.GREEDY} | fields
    return SequenceSpec(prompt, speculation=Speculation(count), **given)  # type: ignore[arg-type]


def proposed(source: Told) -> list[tuple[SequenceKey, int, list[int], int]]:
    trees = [(key, tree) for key, tree in source.poll() if isinstance(tree, DraftTree)]
    return [(key, tree.base_len, tree.guess(), tree.matched) for key, tree in trees]


def test_the_text_so_far_is_looked_up_once_after_each_commit() -> None:
    source = Told(ngrams())
    source.open(KEY, opening([1, 2, 3, 4, 9, 1, 2]))
    source.open(OTHER, opening([5, 6, 7]))
    assert proposed(source) == [(KEY, 7, [3, 4, 9, 1], 2)]
    assert proposed(source) == []
    source.commit(KEY, 7, [3, 4])
    assert proposed(source) == [(KEY, 9, [9, 1, 2, 3], 4)]
    source.commit(KEY, 9, [8])
    assert proposed(source) == []
    source.commit(KEY, 10, [1, 2])
    assert proposed(source) == [(KEY, 12, [3, 4, 8, 1], 2)]


@pytest.mark.parametrize(("matched", "count"), [(2, 8), (4, 16), (20, 32)])
def test_a_longer_match_is_continued_further(matched: int, count: int) -> None:
    rng = random.Random(0)
    text = [rng.randrange(10_000) for _ in range(100)]
    source = Told(ngrams())
    source.open(KEY, opening([*text, *text[: min(matched, 8)]], 32))
    proposed(source)
    source.commit(KEY, 100 + min(matched, 8), text[min(matched, 8) : matched])
    [(_, _, guess, length)] = proposed(source)
    assert (guess, length) == (text[matched : matched + count], matched)


def test_a_closed_or_paused_sequence_is_not_looked_up() -> None:
    source = Told(ngrams())
    source.open(KEY, opening([1, 2, 3, 1, 2]))
    source.limit(KEY, Speculation(0))
    assert proposed(source) == []
    source.limit(KEY, Speculation(1))
    assert proposed(source) == [(KEY, 5, [3], 2)]
    source.close(KEY, CloseReason.FINISHED)
    source.commit(KEY, 5, [3])
    assert proposed(source) == []


def test_a_proposal_ends_with_a_stop_token() -> None:
    source = Told(ngrams())
    source.open(KEY, opening([1, 2, 3, 4, 1, 2], stop_token_ids=frozenset({4})))
    assert proposed(source) == [(KEY, 6, [3, 4], 2)]


def test_in_ratio_mode_what_is_looked_up_has_probability_one() -> None:
    source = Told(ngrams())
    source.open(KEY, opening([1, 2, 3, 1, 2], params=SamplingParams(temperature=1), mode=VerificationMode.RATIO))
    [(_, tree)] = source.poll()
    assert isinstance(tree, DraftTree)
    assert [(q.token_ids, q.counts) for q in tree.q] == [((token,), (65536,)) for token in tree.token_ids]


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    source, prompt = Told(ngrams()), [*range(3000), 1, 2]
    source.open(KEY, opening(prompt))
    assert [bool(proposed(source)) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("seed", range(8))
def test_a_match_that_is_followed_goes_on_as_one_that_is_searched_anew(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(50) for _ in range(40)]
    tokens = [*text, *text[:3]]
    followed = NgramLookup(tokens)
    for position in range(3, 30):
        assert followed.find(3) == (text[position : position + 3], position)
        tokens.append(text[position])


def test_a_prediction_is_proposed_and_gone_on_with_where_the_answer_leaves_it() -> None:
    source, predicted = Told(predictions()), list(range(100, 120))
    source.open(OTHER, opening([5, 6]))
    source.open(KEY, opening([5, 6], 3, prediction=predicted, committed=[100]))
    assert [found[:3] for found in proposed(source)] == [(KEY, 3, [101, 102, 103])]
    source.commit(KEY, 3, [101, 9])
    assert [found[:3] for found in proposed(source)] == [(KEY, 5, [103, 104, 105])], "as if 9 stood for 102"


def test_sources_are_made_by_name_and_a_name_stands_for_one() -> None:
    assert len(make_sources(NAMES)) == len(NAMES)
    with pytest.raises(ValueError, match="'oracle' is not a source of drafts"):
        make_sources(["oracle"])
    with pytest.raises(ValueError, match="called 'ngram' already"):
        register("ngram")(ngrams)
