"""The draft buffer: what is taken, trimmed, dropped and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.errors import InvalidRequest
from outrider.speculation import DraftDistribution, SamplingParams, VerificationMode
from outrider.target.drafts import DraftBuffer, OfferedDraft

TRUTH = [10, 11, 12, 13]


def offered(base_len: int, *token_ids: int, epoch: int = 0) -> OfferedDraft:
    return OfferedDraft(epoch, base_len, token_ids)


def held(*drafts: OfferedDraft, capacity: int = 8) -> DraftBuffer:
    buffer = DraftBuffer()
    for draft in drafts:
        buffer.offer(draft, TRUTH, capacity)
    return buffer


def test_a_draft_for_the_next_position_is_taken_whole() -> None:
    buffer = held(offered(4, 20, 21))
    assert buffer.token_ids == [20, 21]
    assert buffer.num_dropped == 0


def test_what_equals_the_committed_tokens_is_trimmed_and_not_counted() -> None:
    buffer = held(offered(2, 12, 13, 20, 21))
    assert buffer.token_ids == [20, 21]
    assert buffer.num_dropped == 0


def test_a_draft_that_is_altogether_old_and_right_leaves_no_trace() -> None:
    buffer = held(offered(1, 11, 12))
    assert not buffer.token_ids
    assert buffer.num_dropped == 0


def test_a_draft_that_contradicts_the_committed_tokens_is_dropped_and_counted() -> None:
    buffer = held(offered(2, 12, 99, 20))
    assert not buffer.token_ids
    assert buffer.num_dropped == 3


def arrivals(buffer: DraftBuffer) -> list[tuple[int, float]]:
    return [(each.serial, each.received_s) for each in buffer.arrivals]


def test_every_token_knows_which_message_brought_it_and_when() -> None:
    buffer = held(
        OfferedDraft(0, 4, (20, 21), serial=1, received_s=5.0),
        OfferedDraft(0, 4, (20, 21, 22), serial=2, received_s=6.0),
        OfferedDraft(0, 6, (22, 23), serial=3, received_s=7.0),
    )
    assert arrivals(buffer) == [(1, 5.0), (1, 5.0), (2, 6.0), (3, 7.0)]
    buffer.advance([20], num_in_step=1)
    assert arrivals(buffer) == [(1, 5.0), (2, 6.0), (3, 7.0)]
    buffer.cut(2)
    assert arrivals(buffer) == [(1, 5.0), (2, 6.0)]
    buffer.offer(OfferedDraft(1, 5, (30,), serial=4, received_s=8.0), [*TRUTH, 20], 8)
    assert (buffer.token_ids, arrivals(buffer)) == ([30], [(4, 8.0)])
    buffer.advance([31], num_in_step=1)
    assert buffer.arrivals == []


def test_a_gap_is_dropped_and_counted() -> None:
    buffer = held(offered(5, 20, 21))
    assert not buffer.token_ids
    assert buffer.num_dropped == 2


def test_a_position_far_outside_is_dropped_and_counted() -> None:
    assert held(offered(2**32 - 1, 20)).num_dropped == 1


def test_the_next_draft_continues_the_one_before() -> None:
    buffer = held(offered(4, 20, 21), offered(6, 22))
    assert buffer.token_ids == [20, 21, 22]


def test_an_equal_repetition_is_trimmed_and_extends() -> None:
    buffer = held(offered(4, 20, 21), offered(3, 13, 20, 21, 22))
    assert buffer.token_ids == [20, 21, 22]
    assert buffer.num_dropped == 0


def test_a_draft_that_contradicts_the_buffer_in_the_same_epoch_is_dropped() -> None:
    buffer = held(offered(4, 20, 21), offered(4, 30, 31, 32))
    assert buffer.token_ids == [20, 21]
    assert buffer.num_dropped == 3


def test_a_higher_epoch_replaces_the_guess_and_counts_what_it_replaced() -> None:
    buffer = held(offered(4, 20, 21), offered(4, 30, epoch=1))
    assert buffer.token_ids == [30]
    assert buffer.epoch == 1
    assert buffer.num_dropped == 2


def test_a_lower_epoch_than_the_buffers_is_stale() -> None:
    buffer = held(offered(4, 20, epoch=2), offered(5, 21, epoch=1))
    assert buffer.token_ids == [20]
    assert buffer.num_dropped == 1


def test_another_draft_that_takes_over_may_count_epochs_anew() -> None:
    buffer = held(offered(4, 20, epoch=5))
    buffer.advance([99], num_in_step=1)
    buffer.offer(offered(5, 21, epoch=0), [*TRUTH, 99], 8)
    assert buffer.token_ids == [21]


@pytest.mark.parametrize(
    ("draft", "continues"),
    [
        (offered(6, 22), True),
        (offered(4, 20, 21, 22), True),
        (offered(2, 12, 13, 20, 21, 22), True),
        (offered(4, 20, 21), False),
        (offered(2, 12, 13), False),
        (offered(4, 20, 9, 22), False),
        (offered(2, 12, 9, 20, 21, 22), False),
        (offered(7, 22), False),
        (offered(6, 22, epoch=1), False),
        (offered(6), False),
    ],
    ids=str,
)
def test_a_draft_continues_what_is_held_wherever_it_begins(draft: OfferedDraft, continues: bool) -> None:
    assert held(offered(4, 20, 21)).continued_by(draft, TRUTH) is continues


def test_beyond_its_capacity_nothing_is_kept_and_all_is_counted() -> None:
    buffer = held(offered(4, *range(20, 30)), capacity=3)
    assert buffer.token_ids == [20, 21, 22]
    assert buffer.num_dropped == 7


def test_with_speculation_off_drafts_are_dropped() -> None:
    buffer = held(offered(4, 20), capacity=0)
    assert not buffer.token_ids
    assert buffer.num_dropped == 1


def test_an_empty_draft_declines_the_position_it_names_and_no_later_one() -> None:
    assert held(offered(4)).declined_len == 4
    assert held(offered(400)).declined_len == len(TRUTH)


def test_a_plain_token_that_equals_the_first_guess_keeps_the_rest() -> None:
    buffer = held(offered(4, 20, 21, 22))
    buffer.advance([20], num_in_step=0)
    assert buffer.token_ids == [21, 22]
    assert buffer.num_dropped == 0


def test_a_plain_token_that_differs_drops_the_guess_and_counts_it() -> None:
    buffer = held(offered(4, 20, 21, 22))
    buffer.advance([30], num_in_step=0)
    assert not buffer.token_ids
    assert buffer.num_dropped == 3


def test_judged_drafts_are_not_counted_as_dropped() -> None:
    buffer = held(offered(4, 20, 21, 22, 23))
    buffer.advance([20, 99], num_in_step=3)
    assert not buffer.token_ids
    assert buffer.num_dropped == 1


def test_a_bonus_token_that_equals_the_next_guess_keeps_what_follows() -> None:
    buffer = held(offered(4, 20, 21, 22, 23))
    buffer.advance([20, 21, 22], num_in_step=2)
    assert buffer.token_ids == [23]


def test_more_committed_than_guessed_empties_the_buffer() -> None:
    buffer = held(offered(4, 20, 21))
    buffer.advance([20, 21, 50], num_in_step=2)
    assert not buffer.token_ids
    assert buffer.num_dropped == 0


def test_q_is_trimmed_with_its_tokens() -> None:
    point = [DraftDistribution((token,), (65536,)) for token in (13, 20, 21)]
    buffer = DraftBuffer()
    buffer.offer(OfferedDraft(0, 3, (13, 20, 21), tuple(point)), TRUTH, 8)
    assert buffer.q == point[1:]
    buffer.advance([20], num_in_step=0)
    assert buffer.q == point[2:]


PARAMS = SamplingParams(temperature=0.8, seed=1)
POINT = DraftDistribution((20,), (65536,))


def test_ratio_mode_takes_a_draft_with_q_under_its_own_sampling() -> None:
    OfferedDraft(0, 4, (20,), (POINT,), PARAMS).check(PARAMS, VerificationMode.RATIO)


@pytest.mark.parametrize(
    ("draft", "field"),
    [
        (OfferedDraft(0, 4, (20,)), "q"),
        (OfferedDraft(0, 4, (20,), (POINT,)), "sampling"),
        (OfferedDraft(0, 4, (20,), (POINT,), SamplingParams(temperature=0.7, seed=1)), "sampling"),
    ],
)
def test_ratio_mode_refuses_what_it_could_not_judge_exactly(draft: OfferedDraft, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        draft.check(PARAMS, VerificationMode.RATIO)
    assert caught.value.field == field


def test_other_modes_need_no_q() -> None:
    OfferedDraft(0, 4, (20,)).check(PARAMS, VerificationMode.COUPLED)


def tree(base_len: int, token_ids: tuple[int, ...], parents: tuple[int, ...], epoch: int = 0) -> OfferedDraft:
    return OfferedDraft(epoch, base_len, token_ids, parents=parents, serial=9, received_s=9.0, prepared=True)


# 20 21 22 is the guess; if 30 follows 20, then 31 and 32; if 40 comes at once, then 41.
TREE = tree(4, (20, 21, 22, 30, 31, 32, 40, 41), (-1, 0, 1, 0, 3, 4, -1, 6))


def after(buffer: DraftBuffer, *token_ids: int, judged: int = 0, capacity: int = 8) -> list[int]:
    """What is buffered once these tokens are committed."""
    buffer.advance(token_ids, judged)
    buffer.take_held([*TRUTH, *token_ids], capacity)
    return buffer.token_ids


def test_of_a_tree_the_path_of_first_children_is_the_guess() -> None:
    assert held(TREE).token_ids == [20, 21, 22]
    assert held(offered(4, 20, 21), TREE).token_ids == [20, 21, 22]
    assert TREE.descend() == [20, 21, 22]


def test_a_commit_that_leaves_the_guess_goes_on_with_what_the_tree_has_for_it() -> None:
    buffer = held(offered(4, 20, 21), TREE)
    assert after(buffer, 20, 30, judged=2) == [31, 32]
    assert (buffer.epoch, buffer.take_num_taken(), buffer.take_num_taken()) == (1, 1, 0)
    assert arrivals(buffer) == [(9, 9.0)] * 2
    assert after(held(TREE), 40, judged=3) == [41]


def test_a_commit_that_the_tree_does_not_know_leaves_nothing() -> None:
    buffer = held(TREE)
    assert after(buffer, 20, 50, judged=3) == []
    assert (buffer.held, buffer.num_taken, buffer.epoch) == (None, 0, 0)


def test_a_tree_is_kept_while_the_guess_holds_and_serves_later_commits_too() -> None:
    buffer = held(TREE)
    assert after(buffer, 20) == [21, 22]
    buffer.advance([30], 0)
    buffer.take_held([*TRUTH, 20, 30], 8)
    assert buffer.token_ids == [31, 32]


def test_a_tree_that_comes_after_its_commit_still_serves() -> None:
    buffer = DraftBuffer()
    buffer.offer(TREE, [*TRUTH, 20, 30], 8)
    assert (buffer.token_ids, buffer.epoch, buffer.num_dropped) == ([31, 32], 1, 0)


def test_what_the_draft_says_next_of_the_path_that_was_taken_fits() -> None:
    buffer = held(TREE)
    after(buffer, 40, judged=3)
    # It took the same turn, which raised its epoch, and repeats what stands before it goes on.
    buffer.offer(OfferedDraft(1, 5, (41, 42)), [*TRUTH, 40], 8)
    assert (buffer.token_ids, buffer.num_dropped) == ([41, 42], 0)
    # What it said of the guess that failed comes too late.
    buffer.offer(OfferedDraft(0, 7, (23,)), [*TRUTH, 40], 8)
    assert (buffer.token_ids, buffer.num_dropped) == ([41, 42], 1)


def test_what_may_come_in_place_of_a_guess_is_told_with_its_chance() -> None:
    chances = (0.5, 0.8, 0.9, 0.25, 0.5, 0.5, 0.3, 0.5)
    buffer = held(replace(TREE, confidence=chances))
    assert buffer.beside(TRUTH, 3) == [(0, 40, 0.3), (1, 30, 0.125)]
    assert buffer.beside(TRUTH, 1) == [(0, 40, 0.3)]
    # What is committed is certain.
    after(buffer, 20)
    assert buffer.beside([*TRUTH, 20], 2) == [(0, 30, 0.25)]
    assert after(buffer, 50) == []
    assert buffer.beside([*TRUTH, 20, 50], 0) == []


def test_nothing_is_judged_beside_a_path_that_was_taken_unless_the_tree_has_it_there() -> None:
    tree = replace(TREE, token_ids=(*TREE.token_ids, 33), parents=(*TREE.parents, 3), confidence=(0.5,) * 9)
    buffer = held(offered(4, 20, 21), tree)
    assert after(buffer, 20, 30, judged=2) == [31, 32]
    assert buffer.beside([*TRUTH, 20, 30], 2) == [(0, 33, 0.5)]


def test_what_only_names_tokens_beside_a_guess_takes_no_prepared_path_away() -> None:
    beside = replace(tree(4, (20, 21, 22, 50), (-1, 0, 1, 0)), confidence=(0.5,) * 4, prepared=False)
    buffer = held(offered(4, 20, 21), TREE, beside)
    assert buffer.beside(TRUTH, 3) == [(1, 50, 0.25)]
    assert after(buffer, 20, 30, judged=2) == [31, 32]


def test_what_is_said_ahead_names_its_own() -> None:
    ahead = replace(tree(6, (22, 23, 60), (-1, 0, -1)), confidence=(0.5, 0.5, 0.25), prepared=False)
    buffer = held(offered(4, 20, 21), ahead)
    assert buffer.token_ids == [20, 21, 22, 23]
    assert after(buffer, 20, 21) == [22, 23]
    assert buffer.beside([*TRUTH, 20, 21], 2) == [(0, 60, 0.25)]


def test_a_tree_that_the_text_has_left_is_forgotten() -> None:
    buffer = held(replace(TREE, confidence=(0.5,) * 8))
    assert len(buffer.trees) == 1
    assert after(buffer, 20, 50) == []
    buffer.offer(offered(6, 60), [*TRUTH, 20, 50], 8)
    assert buffer.beside([*TRUTH, 20, 50], 1) == []
    assert not buffer.trees
    long_ago = replace(tree(0, (1,), (-1,)), confidence=(0.5,))
    buffer.offer(long_ago, [*TRUTH, 20, 50], 8)
    assert buffer.beside([*TRUTH, 20, 50], 1) == [] and not buffer.trees


def test_what_is_prepared_anew_takes_the_place_of_what_was_prepared_before() -> None:
    grown = tree(4, (20, 21, 22, 23), (-1, 0, 1, 2))
    buffer = held(offered(4, 20, 21), TREE, grown)
    assert after(buffer, 20, 30, judged=2) == []


def test_a_tree_without_chances_or_of_what_is_still_to_come_has_nothing_beside() -> None:
    assert held(TREE).beside(TRUTH, 3) == []
    ahead = replace(tree(6, (22, 23), (-1, -1)), confidence=(0.5, 0.5))
    assert held(offered(4, 20, 21), ahead).beside(TRUTH, 2) == []


def test_a_newer_epoch_takes_the_tree_back() -> None:
    buffer = held(TREE, offered(4, 60, epoch=1))
    assert after(buffer, 20, 30, judged=1) == []


def test_a_path_is_kept_as_far_as_there_is_room() -> None:
    assert after(held(TREE), 20, 30, capacity=1) == [31]
    buffer = held(TREE, capacity=0)
    assert after(buffer, 20, 30, capacity=0) == []
    assert (buffer.num_dropped, buffer.num_taken) == (0, 0)
