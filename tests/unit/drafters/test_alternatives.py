"""What a draft names beside its guess."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from outrider.drafters import ModelConfig, ModelDrafter
from outrider.drafters.rounds import DraftChain
from outrider.engine import Engine
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import Proposal, SamplingParams, VerificationMode
from outrider.tree import DraftTree

Greedy = Callable[..., SequenceSpec]
MakeEngine = Callable[..., Engine]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 12]


def grown(kept: DraftTree, *proposals: Proposal, most: int = 9) -> DraftTree:
    chain = DraftChain(kept, 8)
    for proposal in proposals:
        chain.add(proposal)
    return chain.tree(most)


def alternatives(tree: DraftTree) -> list[tuple[int, int, float]]:
    """(index of the token in whose place it may come, token, chance)."""
    beside = [node for node in range(len(tree)) if node not in tree.main()]
    return [(tree.depths()[node] - 1, tree.token_ids[node], tree.chances[node]) for node in beside]


EMPTY = DraftTree(4, source="model")


def test_the_likeliest_come_first_wherever_they_stand() -> None:
    first = Proposal(1, 0.5, others=((10, 0.2), (11, 0.15)))
    second = Proposal(2, 0.4, others=((20, 0.35), (21, 0.03)))
    # The last is reached by half, and likely by 0.015 in all.
    assert alternatives(grown(EMPTY, first, second)) == [(0, 10, 0.2), (1, 20, 0.35), (0, 11, 0.15)]
    assert alternatives(grown(EMPTY, first, second, most=1)) == [(0, 10, 0.2)]
    assert grown(EMPTY, first, second, most=0) == DraftTree(4, (1, 2), chances=(0.5, 0.4), source="model")


def test_the_alternatives_to_what_is_left_of_a_guess_are_kept() -> None:
    tree = DraftTree(4, (1, 2, 3, 10, 30), (-1, 0, 1, -1, 1), (0.5, 0.5, 0.5, 0.3, 0.3))
    left = tree.after([1])
    assert left is not None and alternatives(left) == [(1, 30, 0.3)]
    assert alternatives(grown(left, Proposal(4, 0.9, others=((40, 0.09),)))) == [(1, 30, 0.3), (2, 40, 0.09)]
    assert alternatives(tree.upto(2)) == [(0, 10, 0.3)]


@pytest.mark.parametrize("mode", VerificationMode)
def test_a_model_names_what_it_thinks_likely_instead(
    make_engine: MakeEngine, greedy: Greedy, mode: VerificationMode
) -> None:
    params = SamplingParams(temperature=0.0 if mode is VerificationMode.GREEDY else 1.5, seed=3)
    drafter = ModelDrafter(make_engine(), ModelConfig(min_confidence=0.0))
    sequence = drafter.open(SequenceSpec(PROMPT, params, mode, speculation=Speculation(4)))
    [drafted] = drafter.draft([sequence])
    assert drafted is not None and drafted.depth == 4
    if mode is VerificationMode.RATIO:
        assert not alternatives(drafted)
        return
    found, guess = alternatives(drafted), drafted.guess()
    assert 0 < len(found) <= 4
    assert all(token != guess[at] and 0 < chance < 1 for at, token, chance in found)
    assert sequence.guess == drafted
    drafter.close(sequence)
    assert drafter.num_free_blocks == drafter.info.num_blocks


def test_none_are_named_where_none_are_wanted(make_engine: MakeEngine, greedy: Greedy) -> None:
    drafter = ModelDrafter(make_engine(), ModelConfig(min_confidence=0.0, num_alternatives=0))
    [drafted] = drafter.draft([drafter.open(greedy(PROMPT, max_draft_tokens=2))])
    assert drafted is not None and drafted.token_ids and not alternatives(drafted)
