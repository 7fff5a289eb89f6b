"""The truth, the guess, and the epoch between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from outrider.drafters import CommitMismatch, DraftSequence
from outrider.sequence.spec import SequenceSpec
from outrider.tree import DraftTree

Greedy = Callable[..., SequenceSpec]


@pytest.fixture
def sequence(greedy: Greedy) -> DraftSequence:
    sequence = DraftSequence.start(greedy([1, 2, 3], committed=[4]))
    sequence.adopt(DraftTree(4, (5, 6, 7), chances=(0.9, 0.8, 0.7), source="model"))
    return sequence


def test_a_commit_of_all_guesses_and_a_bonus_is_no_divergence(sequence: DraftSequence) -> None:
    sequence.commit(4, [5, 6, 7, 8])
    assert sequence.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (sequence.epoch, sequence.guess) == (0, DraftTree(8, source="model"))


def test_a_plain_commit_that_equals_the_first_guess_leaves_the_rest_standing(sequence: DraftSequence) -> None:
    sequence.commit(4, [5])
    assert (sequence.epoch, sequence.guess) == (0, DraftTree(5, (6, 7), chances=(0.8, 0.7), source="model"))


def test_a_commit_that_contradicts_the_guess_raises_the_epoch(sequence: DraftSequence) -> None:
    sequence.commit(4, [5, 9])
    assert (sequence.epoch, sequence.guess.token_ids) == (1, ())


def test_a_commit_without_a_guess_leaves_the_epoch(sequence: DraftSequence) -> None:
    sequence.commit(4, [9])
    sequence.commit(5, [10])
    assert sequence.epoch == 1


def test_a_repeated_commit_changes_nothing(sequence: DraftSequence) -> None:
    sequence.commit(4, [5, 9])
    sequence.commit(4, [5])
    sequence.commit(4, [5, 9, 10])
    assert sequence.tokens == [1, 2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize(("base_len", "token_ids"), [(5, [6]), (2, [3]), (3, [5]), (3, [4, 9][::-1])])
def test_a_gap_or_a_contradiction_is_refused_and_changes_nothing(
    sequence: DraftSequence, base_len: int, token_ids: list[int]
) -> None:
    with pytest.raises(CommitMismatch):
        sequence.commit(base_len, token_ids)
    assert (sequence.tokens, sequence.guess.token_ids, sequence.epoch) == ([1, 2, 3, 4], (5, 6, 7), 0)


def test_a_longer_proposal_with_the_same_beginning_keeps_the_epoch(sequence: DraftSequence) -> None:
    sequence.adopt(DraftTree(4, (5, 6, 7, 8)))
    assert (sequence.epoch, sequence.guess.token_ids) == (0, (5, 6, 7, 8))


def test_another_proposal_in_the_place_of_a_standing_one_raises_the_epoch(sequence: DraftSequence) -> None:
    sequence.adopt(DraftTree(4, (5, 9), source="ngram"))
    assert (sequence.epoch, sequence.guess.source) == (1, "ngram")


def test_room_leaves_one_of_the_remaining_tokens_to_the_target(greedy: Greedy) -> None:
    sequence = DraftSequence.start(greedy([1], max_new_tokens=4, max_draft_tokens=8))
    assert sequence.room == 3
    sequence.commit(1, [2, 3])
    assert sequence.room == 1
    sequence.commit(3, [4])
    assert sequence.room == 0
