"""What a draft names beside its guess."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from outrider.drafters import Drafted, DraftLimits, ModelConfig, ModelDrafter, Opening, rounds
from outrider.drafters.rounds import Chain
from outrider.drafters.sequence import Beside
from outrider.engine import Engine
from outrider.speculation import Proposal, SamplingParams, VerificationMode

Greedy = Callable[..., Opening]
MakeEngine = Callable[..., Engine]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 12]


def grown(drafted: Drafted, *proposals: Proposal, most: int = 9) -> Drafted:
    chain = Chain(drafted, 8)
    for proposal in proposals:
        chain.add(proposal)
    chain.take_siblings(most)
    return chain.drafted


def test_the_likeliest_come_first_wherever_they_stand() -> None:
    first = Proposal(1, 0.5, others=((10, 0.2), (11, 0.15)))
    second = Proposal(2, 0.4, others=((20, 0.35), (21, 0.03)))
    drafted = grown(Drafted("model"), first, second)
    # The last is reached by half, and likely by 0.015 in all.
    assert drafted.siblings == [(0, 10, 0.2), (1, 20, 0.35), (0, 11, 0.15)]
    assert grown(Drafted("model"), first, second, most=1).siblings == [(0, 10, 0.2)]
    assert grown(Drafted("model"), first, second, most=0).siblings == []


def test_what_stood_beside_a_guess_stands_beside_what_is_left_of_it() -> None:
    drafted = Drafted("model", [1, 2, 3], [0.5, 0.5, 0.5], siblings=[Beside(0, 10, 0.3), Beside(2, 30, 0.3)])
    left = drafted.section(1)
    assert left.siblings == [(1, 30, 0.3)]
    assert grown(left, Proposal(4, 0.9, others=((40, 0.09),))).siblings == [(1, 30, 0.3), (2, 40, 0.09)]
    assert drafted.section(0, 2).siblings == [(0, 10, 0.3)]


def test_a_guess_travels_with_what_stands_beside_it_as_a_tree_of_which_it_is_the_first_path() -> None:
    drafted = Drafted("model", [5, 6, 7], [0.5, 0.6, 0.7], siblings=[Beside(1, 9, 0.3), Beside(0, 8, 0.4)])
    assert list(zip(*drafted.tree(), strict=True)) == [
        (5, -1, 0.5),
        (6, 0, 0.6),
        (7, 1, 0.7),
        (9, 0, 0.3),
        (8, -1, 0.4),
    ]


def test_a_guess_with_nothing_beside_it_travels_as_a_chain() -> None:
    assert Drafted("model", [5, 6], [0.5, 0.6]).tree() == ([5, 6], [], [0.5, 0.6])
    assert Drafted("ngram", [5, 6]).tree() == ([5, 6], [], [])


@pytest.mark.parametrize("mode", VerificationMode)
def test_a_model_names_what_it_thinks_likely_instead(
    make_engine: MakeEngine, greedy: Greedy, mode: VerificationMode
) -> None:
    params = SamplingParams(temperature=0.0 if mode is VerificationMode.GREEDY else 1.5, seed=3)
    drafter = ModelDrafter(make_engine(), ModelConfig(min_confidence=0.0))
    sequence = drafter.open(Opening(PROMPT, params, mode, limits=DraftLimits(4)))
    [drafted] = drafter.draft([sequence])
    assert drafted is not None and len(drafted.token_ids) == 4
    if mode is VerificationMode.RATIO:
        assert not drafted.siblings
        return
    assert 0 < len(drafted.siblings) <= 4
    assert all(one.token_id != drafted.token_ids[one.at] and 0 < one.confidence < 1 for one in drafted.siblings)
    assert sequence.guess.siblings == drafted.siblings
    drafter.close(sequence)
    assert drafter.num_free_blocks == drafter.info.num_blocks


def test_none_are_named_where_none_are_wanted(make_engine: MakeEngine, greedy: Greedy) -> None:
    drafter = ModelDrafter(make_engine(), ModelConfig(min_confidence=0.0, num_siblings=0))
    [drafted] = drafter.draft([drafter.open(greedy(PROMPT, max_draft_tokens=2))])
    assert drafted is not None and drafted.token_ids and not drafted.siblings


def test_what_is_said_ahead_comes_with_what_stands_beside_it(
    make_engine: MakeEngine, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tiny model is sure of nothing.
    monkeypatch.setattr(rounds, "_MIN_CHANCE", 0.0)
    drafter = ModelDrafter(make_engine(), ModelConfig(min_confidence=0.0))
    sequence = drafter.open(greedy(PROMPT, max_draft_tokens=2, run_ahead_tokens=4))
    drafter.draft([sequence])
    before = list(sequence.guess.siblings)
    [added] = drafter.run_ahead([sequence])
    assert len(added.token_ids) == 1 and {one.at for one in added.siblings} == {0}
    assert before and all(one.at < 2 for one in before)
    assert [one for one in sequence.guess.siblings if one.at < 2] == before
