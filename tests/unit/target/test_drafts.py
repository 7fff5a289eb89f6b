"""The draft buffer: what is taken, trimmed, dropped and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.speculation import DraftDistribution
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


def serials(buffer: DraftBuffer) -> list[int]:
    return [each.serial for each in buffer.arrivals]


def test_every_token_knows_which_message_brought_it() -> None:
    buffer = held(
        OfferedDraft(0, 4, (20, 21), serial=1),
        OfferedDraft(0, 4, (20, 21, 22), serial=2),
        OfferedDraft(0, 6, (22, 23), serial=3),
    )
    assert serials(buffer) == [1, 1, 2, 3]
    buffer.advance([20], num_in_step=1)
    assert serials(buffer) == [1, 2, 3]
    buffer.cut(2)
    assert serials(buffer) == [1, 2]
    buffer.offer(OfferedDraft(1, 5, (30,), serial=4), [*TRUTH, 20], 8)
    assert (buffer.token_ids, serials(buffer)) == ([30], [4])
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


CHANCES = (0.5, 0.8, 0.9, 0.25, 0.5, 0.3)


def tree(
    base_len: int, token_ids: tuple[int, ...], parents: tuple[int, ...], confidence: tuple[float, ...] = ()
) -> OfferedDraft:
    return OfferedDraft(0, base_len, token_ids, parents=parents, serial=9, confidence=confidence)


# 20 21 22 is the guess. 30 may come in the place of 21, and 40 in the place of 20. A draft of the version before may
# also say what follows 30.
TREE = tree(4, (20, 21, 22, 30, 31, 40), (-1, 0, 1, 0, 3, -1), CHANCES)


def after(buffer: DraftBuffer, *token_ids: int, judged: int = 0) -> list[int]:
    """What is buffered once these tokens are committed."""
    buffer.advance(token_ids, judged)
    return buffer.token_ids


def test_of_a_tree_the_path_of_first_children_is_the_guess() -> None:
    assert held(TREE).token_ids == [20, 21, 22]
    assert held(offered(4, 20, 21), TREE).token_ids == [20, 21, 22]
    assert TREE.guess().token_ids == (20, 21, 22)
    assert TREE.guess().confidence == CHANCES[:3]


def test_a_chain_is_its_own_guess() -> None:
    chain = offered(4, 20, 21)
    assert chain.guess() is chain


def test_a_commit_that_leaves_the_guess_leaves_nothing_whatever_the_tree_has_after_it() -> None:
    buffer = held(TREE)
    assert after(buffer, 20, 30, judged=3) == []
    assert (buffer.epoch, buffer.num_dropped) == (0, 0)
    late = DraftBuffer()
    late.offer(TREE, [*TRUTH, 20, 30], 8)
    assert (late.token_ids, late.num_dropped) == ([], 3)


def test_a_draft_that_goes_on_where_its_tree_left_the_guess_is_taken() -> None:
    buffer = held(TREE)
    after(buffer, 20, 30, judged=3)
    # As the version before does: its epoch is the next, and it repeats what stands before it goes on.
    buffer.offer(offered(6, 31, 32, epoch=1), [*TRUTH, 20, 30], 8)
    assert (buffer.token_ids, buffer.num_dropped) == ([31, 32], 0)
    # What it said of the guess that failed comes too late.
    buffer.offer(offered(7, 23), [*TRUTH, 20, 30], 8)
    assert (buffer.token_ids, buffer.num_dropped) == ([31, 32], 1)


def test_of_a_tree_that_is_stale_its_guess_is_counted() -> None:
    assert held(offered(4, 60, epoch=1), TREE).num_dropped == 3


def test_what_may_come_in_place_of_a_guess_is_told_with_its_chance() -> None:
    buffer = held(TREE)
    assert buffer.beside(TRUTH, 3) == [(0, 40, 0.3), (1, 30, 0.125)]
    assert buffer.beside(TRUTH, 1) == [(0, 40, 0.3)]
    # What is committed is certain.
    after(buffer, 20)
    assert buffer.beside([*TRUTH, 20], 2) == [(0, 30, 0.25)]
    assert after(buffer, 50) == []
    assert buffer.beside([*TRUTH, 20, 50], 0) == []


def test_a_later_tree_adds_what_stands_beside_a_guess_to_that_of_the_one_before() -> None:
    buffer = held(TREE, tree(4, (20, 21, 50), (-1, 0, 0), (0.5, 0.5, 0.5)))
    assert buffer.token_ids == [20, 21, 22]
    assert set(buffer.beside(TRUTH, 3)) == {(0, 40, 0.3), (1, 30, 0.125), (1, 50, 0.25)}


def test_what_is_said_ahead_names_its_own() -> None:
    ahead = tree(6, (22, 23, 60), (-1, 0, -1), (0.5, 0.5, 0.25))
    buffer = held(offered(4, 20, 21), ahead)
    assert buffer.token_ids == [20, 21, 22, 23]
    assert after(buffer, 20, 21) == [22, 23]
    assert buffer.beside([*TRUTH, 20, 21], 2) == [(0, 60, 0.25)]


def test_a_tree_that_the_text_has_left_is_forgotten() -> None:
    buffer = held(TREE)
    assert len(buffer.trees) == 1
    assert after(buffer, 20, 50) == []
    buffer.offer(offered(6, 60), [*TRUTH, 20, 50], 8)
    assert buffer.beside([*TRUTH, 20, 50], 1) == []
    assert not buffer.trees
    buffer.offer(tree(0, (1,), (-1,), (0.5,)), [*TRUTH, 20, 50], 8)
    assert buffer.beside([*TRUTH, 20, 50], 1) == [] and not buffer.trees


def test_a_tree_without_chances_or_of_what_is_still_to_come_has_nothing_beside() -> None:
    assert held(replace(TREE, confidence=())).beside(TRUTH, 3) == []
    ahead = tree(6, (22, 23), (-1, -1), (0.5, 0.5))
    assert held(offered(4, 20, 21), ahead).beside(TRUTH, 2) == []


def test_a_newer_epoch_takes_the_tree_back() -> None:
    buffer = held(TREE, offered(4, 20, 60, epoch=1))
    assert buffer.beside(TRUTH, 2) == []


def test_a_guess_is_kept_as_far_as_there_is_room() -> None:
    buffer = held(TREE, capacity=1)
    assert (buffer.token_ids, buffer.num_dropped) == ([20], 2)
