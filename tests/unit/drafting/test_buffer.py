"""The draft buffer: what is taken, trimmed, dropped and counted."""

from __future__ import annotations

import pytest
from outrider.drafting.buffer import DraftBuffer
from outrider.options.sampling import DraftDistribution
from outrider.tree import DraftTree

TRUTH = [10, 11, 12, 13]


def offered(base_len: int, *token_ids: int, epoch: int = 0) -> DraftTree:
    return DraftTree(base_len, token_ids, epoch=epoch)


def held(*drafts: DraftTree, capacity: int = 8) -> DraftBuffer:
    buffer = DraftBuffer()
    for draft in drafts:
        buffer.offer(draft, TRUTH, capacity)
    return buffer


def held_tree(buffer: DraftBuffer) -> DraftTree:
    """All that the buffer holds, as one tree."""
    return buffer.merged() or DraftTree(0)


def guess(buffer: DraftBuffer) -> list[int]:
    return held_tree(buffer).guess()


def after(buffer: DraftBuffer, *token_ids: int, judged: int = 0) -> list[int]:
    """The guess that is left once these tokens are committed."""
    buffer.advance(token_ids, judged)
    return guess(buffer)


OFFERED: dict[str, tuple[list[DraftTree], list[int], int]] = {
    "for the next position": ([offered(4, 20, 21)], [20, 21], 0),
    "from before it: trimmed": ([offered(2, 12, 13, 20, 21)], [20, 21], 0),
    "altogether old and right": ([offered(1, 11, 12)], [], 0),
    "against what is committed": ([offered(2, 12, 99, 20)], [], 3),
    "after a gap": ([offered(5, 20, 21)], [], 2),
    "far outside": ([offered(2**32 - 1, 20)], [], 1),
    "an equal repetition extends": ([offered(4, 20, 21), offered(3, 13, 20, 21, 22)], [20, 21, 22], 0),
    "against what is held": ([offered(4, 20, 21), offered(4, 30, 31, 32)], [20, 21], 3),
    "a higher epoch": ([offered(4, 20, 21), offered(4, 30, epoch=1)], [30], 2),
    "a lower epoch": ([offered(4, 20, epoch=2), offered(4, 20, epoch=1)], [20], 1),
}


@pytest.mark.parametrize("case", OFFERED)
def test_what_is_offered_is_taken_trimmed_or_dropped_and_counted(case: str) -> None:
    drafts, *wanted = OFFERED[case]
    buffer = held(*drafts)
    assert [guess(buffer), buffer.num_dropped] == wanted


COMMITTED: dict[str, tuple[list[int], int, list[int], int]] = {
    "a plain token that equals the guess": ([20], 0, [21, 22, 23], 0),
    "a plain token that differs": ([30], 0, [], 4),
    "what was judged is not dropped": ([20, 99], 3, [], 1),
    "a bonus that equals the next guess": ([20, 21, 22], 2, [23], 0),
    "more than was guessed": ([20, 21, 22, 23, 50], 4, [], 0),
}


@pytest.mark.parametrize("case", COMMITTED)
def test_a_commit_keeps_what_follows_it_and_counts_what_was_never_judged(case: str) -> None:
    committed, judged, *wanted = COMMITTED[case]
    buffer = held(offered(4, 20, 21, 22, 23))
    assert [after(buffer, *committed, judged=judged), buffer.num_dropped] == wanted


def serials(buffer: DraftBuffer) -> list[int]:
    tree = held_tree(buffer)
    return [tree.origin(node).serial for node in range(len(tree))]


def test_every_token_knows_which_message_brought_it() -> None:
    buffer = held(
        DraftTree(4, (20, 21), epoch=0, serial=1),
        DraftTree(4, (20, 21, 22), epoch=0, serial=2),
        DraftTree(3, (13, 20, 21, 22, 23), epoch=0, serial=3),
    )
    assert serials(buffer) == [1, 1, 2, 3]
    buffer.advance([20], num_in_step=1)
    assert serials(buffer) == [1, 2, 3]
    buffer.limit(2, 2)
    assert serials(buffer) == [1, 2]
    buffer.offer(DraftTree(5, (30,), epoch=1, serial=4), [*TRUTH, 20], 8)
    assert (guess(buffer), serials(buffer)) == ([30], [4])
    buffer.advance([31], num_in_step=1)
    assert buffer.trees == []


def test_what_a_draft_sends_beyond_its_proposal_is_taken_when_it_comes_again_after_the_commit() -> None:
    buffer = held(offered(4, 20, 21), offered(6, 22))
    assert (guess(buffer), buffer.num_dropped) == ([20, 21], 1)
    buffer.advance([20, 21], num_in_step=2)
    buffer.offer(offered(6, 22, 23), [*TRUTH, 20, 21], 8)
    assert guess(buffer) == [22, 23]


def test_another_draft_that_takes_over_may_count_epochs_anew() -> None:
    buffer = held(offered(4, 20, epoch=5))
    buffer.advance([99], num_in_step=1)
    buffer.offer(offered(5, 21, epoch=0), [*TRUTH, 99], 8)
    assert guess(buffer) == [21]


def test_beyond_its_capacity_nothing_is_kept_and_all_is_counted() -> None:
    buffer = held(offered(4, *range(20, 30)), capacity=3)
    assert guess(buffer) == [20, 21, 22]
    assert buffer.num_dropped == 7


def test_with_speculation_off_drafts_are_dropped() -> None:
    buffer = held(offered(4, 20), capacity=0)
    assert not guess(buffer)
    assert buffer.num_dropped == 1


def test_an_empty_draft_declines_the_position_it_names_and_no_later_one() -> None:
    assert held(offered(4)).answered_len == 4
    assert held(offered(400)).answered_len == len(TRUTH)


def test_q_is_trimmed_with_its_tokens() -> None:
    point = [DraftDistribution((token,), (65536,)) for token in (13, 20, 21)]
    buffer = DraftBuffer()
    buffer.offer(DraftTree(3, (13, 20, 21), q=tuple(point)), TRUTH, 8)
    assert list(held_tree(buffer).q) == point[1:]
    buffer.advance([20], num_in_step=0)
    assert list(held_tree(buffer).q) == point[2:]


CHANCES = (0.5, 0.8, 0.9, 0.25, 0.5, 0.3)
# 20 21 22 is the guess. 30 31 may come in the place of 21, and 40 in the place of 20.
TREE = DraftTree(4, (20, 21, 22, 30, 31, 40), (-1, 0, 1, 0, 3, -1), CHANCES, serial=9)


def test_a_tree_is_held_whole_and_may_continue_a_chain() -> None:
    assert guess(held(TREE)) == [20, 21, 22] and len(held_tree(held(TREE))) == 6
    assert len(held_tree(held(offered(4, 20, 21), TREE))) == 6


def test_a_commit_that_leaves_the_guess_goes_on_along_its_branch() -> None:
    buffer = held(TREE)
    assert after(buffer, 20, 30, judged=3) == [31]
    assert buffer.num_dropped == 0
    late = DraftBuffer()
    late.offer(TREE, [*TRUTH, 20, 30], 8)
    assert (guess(late), late.num_dropped) == ([31], 0)


def test_a_branch_that_ends_with_the_commit_leaves_nothing_and_the_guess_beside_it_is_counted() -> None:
    buffer = held(TREE)
    assert after(buffer, 40, judged=1) == []
    assert (buffer.trees, buffer.num_dropped) == ([], 2)


def test_of_a_tree_that_is_stale_its_guess_is_counted() -> None:
    assert held(offered(4, 60, epoch=1), TREE).num_dropped == 3


def test_a_newer_epoch_takes_the_tree_back() -> None:
    buffer = held(TREE, offered(4, 20, 60, epoch=1))
    assert (held_tree(buffer).token_ids, held_tree(buffer).epoch) == ((20, 60), 1)
    assert buffer.num_dropped == 3


def test_a_tree_is_kept_as_far_as_there_is_room() -> None:
    buffer = held(TREE, capacity=1)
    assert (held_tree(buffer).token_ids, buffer.num_dropped) == ((20, 40), 2)


def test_a_source_that_never_stops_fills_no_memory() -> None:
    many = [DraftTree(4, (20, 21, *range(100 * n, 100 * n + 98)), (-1, *[0] * 99)) for n in range(1, 9)]
    buffer = held(*many)
    assert (len(held_tree(buffer)), buffer.num_dropped) == (198, 12)


def looked_up(base_len: int, *token_ids: int) -> DraftTree:
    return DraftTree(base_len, token_ids, source="ngram", matched=3)


def test_a_worker_that_names_ever_new_sources_holds_no_step_up() -> None:
    buffer = held(*(DraftTree(4, (100 + number,), source=f"source {number}") for number in range(3000)))
    assert len(held_tree(buffer)) == 8 and buffer.num_dropped == 2992


def test_trees_of_several_sources_are_one_in_which_equal_beginnings_are_one_node() -> None:
    buffer = held(DraftTree(4, (20, 21), chances=(0.5, 0.5), source="model"))
    buffer.put(looked_up(4, 20, 30), 4, 8)
    tree = held_tree(buffer)
    assert tree.token_ids == (20, 21, 30)
    assert [tree.origin(node).source for node in range(3)] == ["ngram", "model", "ngram"]


def test_what_was_looked_up_answers_one_commit_and_counts_nowhere() -> None:
    buffer = DraftBuffer()
    buffer.put(looked_up(4, 20, 21), 4, 8)
    buffer.put(looked_up(4, 30, 31, 32), 4, 2)
    assert guess(buffer) == [30, 31]
    buffer.put(looked_up(3, 13, 40), 4, 8)
    assert guess(buffer) == [30, 31]
    assert not buffer.has_answer(4) and not buffer.active
    assert after(buffer, 30) == [] and buffer.num_dropped == 0


def test_a_part_that_is_kept_is_kept_in_every_tree() -> None:
    buffer = held(offered(4, 20, 21, 22))
    buffer.put(looked_up(4, 30, 31), 4, 8)
    buffer.keep(lambda tree: tree.upto(1))
    assert (held_tree(buffer).token_ids, buffer.num_dropped) == ((20, 30), 2)
