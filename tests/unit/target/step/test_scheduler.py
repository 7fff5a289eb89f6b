"""The scheduler's decisions, without a model: sequences, free blocks and a clock in, a plan out."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.engine import EngineSequence
from outrider.sequence.speculation import PLAIN, Speculation
from outrider.speculation import Q_TOTAL, DraftDistribution, SamplingParams, VerificationMode
from outrider.target.drafts.calibration import Bin, Calibration, Fit, bin_of
from outrider.target.drafts.choice import Pricing
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.times import Timer
from outrider.target.step.scheduler import Batching, StepPlan, admissible, plan
from outrider.target.step.sequence import TargetSequence
from outrider.tree import DraftTree
from outrider.worker.events import SequenceKey

from tests.unit.target.harness import FOUR_AHEAD, opening

DRAWN = SamplingParams(temperature=1.0, seed=3)
BATCHING = Batching(block_size=8, max_batch_tokens=32)


def sequence(
    serial: int,
    *,
    length: int = 10,
    cached: int | None = 9,
    drafts: int = 0,
    speculation: Speculation = FOUR_AHEAD,
    max_new_tokens: int = 100,
    ready_since_s: float = 0.0,
    draft_active: bool = True,
) -> TargetSequence:
    what = opening([1] * length, speculation=speculation, max_new_tokens=max_new_tokens)
    made = TargetSequence(
        SequenceKey(1, serial), serial, what, 512, Timer(ready_since_s), SequenceDrafts.of(what, what.tokens)
    )
    if cached is not None:
        made.kv = EngineSequence(tokens=[1] * cached)
    made.drafts.buffer.active = draft_active
    if drafts:
        made.drafts.offer(DraftTree(length, (7,) * drafts))
    return made


def rows(planned: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(r.sequence.serial, r.num_tokens, len(r.draft), r.decides) for r in planned.rows]


def test_plain_decoding_and_verification_share_a_step() -> None:
    planned = plan([sequence(0, drafts=3), sequence(1)], BATCHING, free_blocks=9, now_s=0)
    assert rows(planned) == [(0, 1, 3, True), (1, 1, 0, True)]


def test_a_long_prompt_is_run_in_chunks_beside_decoding() -> None:
    planned = plan([sequence(0), sequence(1, length=100, cached=0)], BATCHING, free_blocks=20, now_s=0)
    assert rows(planned) == [(0, 1, 0, True), (1, 31, 0, False)]


def test_the_last_chunk_decides_and_takes_drafts_along() -> None:
    planned = plan([sequence(0, length=100, cached=90, drafts=2)], BATCHING, free_blocks=20, now_s=0)
    assert rows(planned) == [(0, 10, 2, True)]


def test_drafts_leave_prefill_its_share() -> None:
    many = [sequence(i, drafts=4) for i in range(8)]
    planned = plan([*many, sequence(8, length=100, cached=0)], BATCHING, free_blocks=99, now_s=0)
    tokens = {serial: count + drafted for serial, count, drafted, _ in rows(planned)}
    assert tokens[8] == 8
    assert sum(tokens.values()) == 32
    assert all(tokens[i] >= 1 for i in range(8))


def branching(serial: int, *chances: float, **more: object) -> TargetSequence:
    """7 and then 8 are guessed, and in the place of the second one of these may come: 20, 21, …"""
    made = sequence(serial, **more)  # type: ignore[arg-type]
    ids, parents = (7, 8, *range(20, 20 + len(chances))), (-1, 0, *(0 for _ in chances))
    made.drafts.offer(DraftTree(10, ids, parents, (0.9, 0.4, *chances), source="model"))
    return made


def taken(planned: StepPlan) -> list[list[int]]:
    return [list(row.draft.token_ids) for row in planned.rows]


def test_tokens_of_several_branches_are_taken_the_likeliest_path_of_all_sequences_first() -> None:
    sequences = [branching(0, 0.1, 0.3), branching(1, 0.2)]
    assert taken(plan(sequences, BATCHING, 9, 0, Pricing(0.02, PROVEN))) == [[7, 8, 21, 20], [7, 8, 20]]
    assert taken(plan(sequences, BATCHING, 9, 0, Pricing(0.25, PROVEN))) == [[7, 8, 21], [7, 8]]
    assert taken(plan(sequences, BATCHING, 9, 0, Pricing(0.7, PROVEN))) == [[7], [7]]
    # The third best of all has no room: the second of the first sequence is likelier than those beside it.
    few = Batching(block_size=8, max_batch_tokens=7)
    assert taken(plan(sequences, few, 9, 0, Pricing(0.02, PROVEN))) == [[7, 8, 21], [7, 8]]


def test_an_alternative_that_was_never_verified_is_worth_what_its_draft_says() -> None:
    assert taken(plan([branching(0, 0.1)], BATCHING, 9, 0, Pricing(0.3))) == [[7, 8]]
    # As much as a first choice of which nothing is known yet, which is hoped for.
    assert taken(plan([offering(0, 0.1)], BATCHING, 9, 0, Pricing(0.3))) == [[7]]


def test_branches_are_bounded_and_leave_room_for_all_else() -> None:
    few = Batching(block_size=8, max_batch_tokens=8)
    waiting = sequence(1, length=100, cached=0)
    planned = plan([branching(0, 0.4, 0.3, 0.2, 0.1), waiting], few, 99, 0, Pricing(0.01, PROVEN))
    assert [row.num_run for row in planned.rows] == [6, 2]
    none = Batching(block_size=8, max_branch_tokens=0)
    assert taken(plan([branching(0, 0.4)], none, 99, 0, Pricing(0.01, PROVEN))) == [[7, 8]]


def test_no_step_exceeds_the_token_budget() -> None:
    many = [sequence(i, drafts=4) for i in range(20)]
    planned = plan(many, BATCHING, free_blocks=99, now_s=0)
    assert len(planned.rows) == 20
    assert sum(r.num_tokens + len(r.draft) for r in planned.rows) == 32


@pytest.mark.parametrize(("matched", "taken"), [(3, range(2, 6)), (20, range(12, 25)), (200, range(32, 33))])
def test_the_longer_the_run_that_a_lookup_continues_the_more_of_it_is_verified(matched: int, taken: range) -> None:
    made = sequence(0, speculation=Speculation(max_own_draft_tokens=32), draft_active=False)
    made.drafts.put(DraftTree(10, (7,) * 32, source="suffix", matched=matched))
    planned = plan([made], Batching(block_size=8), free_blocks=99, now_s=0, pricing=Pricing(price=0.5))
    assert len(planned.rows[0].draft) in taken


def test_beside_a_long_lookup_no_more_is_verified_of_what_a_draft_worker_sends() -> None:
    made = sequence(0, speculation=Speculation(2, max_own_draft_tokens=32))
    made.drafts.offer(DraftTree(10, (8,) * 6, source="model"))
    made.drafts.put(DraftTree(10, (7,) * 12, source="suffix", matched=200))
    [row] = plan([made], BATCHING, free_blocks=99, now_s=0).rows
    assert row.draft.token_ids.count(7) == 12 and row.draft.token_ids.count(8) == 2
    made.drafts.adjust(Speculation(1, max_own_draft_tokens=8), Speculation(1, max_own_draft_tokens=8))
    [row] = plan([made], BATCHING, free_blocks=99, now_s=0).rows
    assert row.draft.token_ids.count(7) == 8 and row.draft.token_ids.count(8) == 1


def test_never_more_drafts_than_the_sequence_allows() -> None:
    planned = plan([sequence(0, drafts=4, speculation=Speculation(2))], BATCHING, free_blocks=9, now_s=0)
    assert rows(planned) == [(0, 1, 2, True)]


def test_the_last_token_is_the_targets_own_so_drafts_end_before_it() -> None:
    planned = plan([sequence(0, drafts=4, max_new_tokens=3)], BATCHING, free_blocks=9, now_s=0)
    assert rows(planned) == [(0, 1, 2, True)]


WAITING = Speculation(max_draft_tokens=4, max_wait_us=5000)


def test_sequences_wait_for_their_drafts_until_one_is_ready() -> None:
    both = [sequence(0, speculation=WAITING), sequence(1, speculation=WAITING, ready_since_s=0.0005)]
    planned = plan(both, BATCHING, free_blocks=9, now_s=0.001)
    assert not planned.rows and planned.wake_at_s == pytest.approx(0.005)
    for ready, num_tokens in ((sequence(2), 1), (sequence(2, cached=0), 10)):
        planned = plan([*both, ready], BATCHING, free_blocks=9, now_s=0.001)
        assert rows(planned) == [(0, 1, 0, True), (1, 1, 0, True), (2, num_tokens, 0, True)]
        assert planned.wake_at_s is None


def test_a_draft_is_not_waited_for_before_its_first_word() -> None:
    silent = sequence(0, speculation=WAITING, draft_active=False)
    assert rows(plan([silent], BATCHING, free_blocks=9, now_s=0.001)) == [(0, 1, 0, True)]
    # Of what was committed before, and dropped.
    silent.drafts.offer(DraftTree(8, (3, 3)))
    assert plan([silent], BATCHING, free_blocks=9, now_s=0.001).held


def test_a_draft_that_paused_is_waited_for_after_its_next_word() -> None:
    paused = sequence(0, speculation=WAITING)
    paused.drafts.adjust(PLAIN, PLAIN)
    # Said before it knew.
    paused.drafts.offer(DraftTree(10, (3, 3)))
    paused.drafts.adjust(WAITING, WAITING)
    assert rows(plan([paused], BATCHING, free_blocks=9, now_s=0.001)) == [(0, 1, 0, True)]


def test_the_wait_ends_at_its_bound() -> None:
    planned = plan([sequence(0, speculation=WAITING)], BATCHING, free_blocks=9, now_s=0.0051)
    assert rows(planned) == [(0, 1, 0, True)]


def test_the_wait_ends_when_a_draft_is_there() -> None:
    planned = plan([sequence(0, speculation=WAITING, drafts=1)], BATCHING, free_blocks=9, now_s=0.001)
    assert rows(planned) == [(0, 1, 1, True)]


def test_the_wait_ends_when_the_draft_declines() -> None:
    declined = sequence(0, speculation=WAITING)
    declined.drafts.offer(DraftTree(10, ()))
    assert rows(plan([declined], BATCHING, free_blocks=9, now_s=0.001)) == [(0, 1, 0, True)]


def test_prefill_waits_for_nobody() -> None:
    planned = plan([sequence(0, cached=0, speculation=WAITING)], BATCHING, free_blocks=9, now_s=0.001)
    assert rows(planned) == [(0, 10, 0, True)]


def test_nobody_waits_for_a_draft_of_the_very_last_token() -> None:
    last = sequence(0, speculation=WAITING, max_new_tokens=1)
    assert rows(plan([last], BATCHING, free_blocks=9, now_s=0.001)) == [(0, 1, 0, True)]


def test_drafts_shrink_to_the_free_blocks_before_anyone_is_preempted() -> None:
    full = sequence(0, length=16, cached=15, drafts=4)
    assert rows(plan([full], BATCHING, free_blocks=0, now_s=0)) == [(0, 1, 0, True)]


def test_drafts_of_the_old_leave_the_blocks_that_others_need_to_decode() -> None:
    old, new = sequence(0, length=16, cached=15, drafts=4), sequence(1, length=17, cached=16)
    assert rows(plan([old, new], BATCHING, free_blocks=1, now_s=0)) == [(0, 1, 0, True), (1, 1, 0, True)]


def test_when_decoding_needs_a_block_the_newest_sequence_pays() -> None:
    oldest, newest = sequence(0, length=17, cached=16), sequence(5, length=9, cached=8)
    planned = plan([newest, oldest], BATCHING, free_blocks=1, now_s=0)
    assert planned.victim is newest
    assert not planned.rows


def test_prefill_without_blocks_waits_for_the_decoding_to_end() -> None:
    planned = plan([sequence(0), sequence(1, length=50, cached=16)], BATCHING, free_blocks=0, now_s=0)
    assert rows(planned) == [(0, 1, 0, True)]
    assert planned.victim is None


def test_a_prefill_that_nothing_can_unblock_preempts_the_newest() -> None:
    old, new = sequence(0, length=50, cached=16), sequence(1, length=50, cached=16)
    assert plan([old, new], BATCHING, free_blocks=0, now_s=0).victim is new


def test_places_are_given_in_the_order_of_opening_while_prefill_can_be_finished() -> None:
    waiting = [sequence(i, length=20, cached=None) for i in (2, 0, 1)]
    assert [s.serial for s in admissible(waiting, BATCHING, free_blocks=6)] == [0, 1]


def test_a_place_is_not_given_twice_to_the_same_blocks() -> None:
    prefilling = sequence(0, length=40, cached=8)
    assert admissible([prefilling, sequence(1, length=16, cached=None)], BATCHING, free_blocks=5) == []
    assert len(admissible([prefilling, sequence(1, length=16, cached=None)], BATCHING, free_blocks=6)) == 1


def test_nothing_to_do_means_no_rows_and_no_time_to_wake() -> None:
    assert plan([], BATCHING, free_blocks=5, now_s=0) == StepPlan()


def offering(serial: int, *confidence: float, weight: float = 1.0, **more: object) -> TargetSequence:
    """One guess, of which a draft says how likely each token is."""
    speculation = replace(FOUR_AHEAD, weight=weight)
    made = sequence(serial, speculation=speculation, **more)  # type: ignore[arg-type]
    made.drafts.offer(DraftTree(10, (7,) * len(confidence), chances=confidence, source="model"))
    return made


def proven() -> Calibration:
    """Of a draft whose word has proved right, many times."""
    calibration = Calibration()
    for number in range(13):
        for drawn in (False, True):
            each = Bin("model", drawn, number)
            for count in range(1000):
                accepted = int((count + 1) * each.prior) > int(count * each.prior)
                calibration.verified([each], accepted, Fit())
    return calibration


PROVEN = proven()


def priced(sequences: list[TargetSequence], price: float, batching: Batching = BATCHING, **more: object) -> list[int]:
    """Drafted rows of each sequence."""
    planned = plan(sequences, batching, 99, 0, Pricing(price, PROVEN, **more))  # type: ignore[arg-type]
    return [len(row.draft) for row in sorted(planned.rows, key=lambda row: row.sequence.serial)]


def test_a_drafted_token_is_judged_where_its_joint_chance_is_worth_its_row() -> None:
    sequences = [offering(0, 0.92, 0.92, 0.92, 0.92), offering(1, 0.92, 0.5, 0.92), offering(2, 0.3)]
    assert priced(sequences, 0.0) == [4, 3, 1]
    assert priced(sequences, 0.4) == [4, 3, 0]
    assert priced(sequences, 0.6) == [4, 1, 0]
    assert priced(sequences, 0.9) == [1, 1, 0]
    assert priced(sequences, 1.0) == [0, 0, 0]


@given(st.lists(st.lists(st.floats(0.02, 0.98), min_size=1, max_size=4), min_size=1, max_size=5), st.floats(0.01, 1.0))
def test_each_draft_is_taken_as_far_as_it_pays_whether_or_not_the_room_would_hold_all(
    drafts: list[list[float]], price: float
) -> None:
    def paying(chances: list[float]) -> int:
        own = [PROVEN.own(bin_of("model", chance), Fit()) for chance in chances]
        return sum(joint >= price for joint in accumulate(own, mul))

    sequences, expected = [offering(number, *each) for number, each in enumerate(drafts)], list(map(paying, drafts))
    assert priced(sequences, price, Batching(block_size=8, max_batch_tokens=99)) == expected
    just_enough = Batching(block_size=8, max_batch_tokens=len(drafts) + sum(expected))
    assert priced(sequences, price, just_enough) == expected


def test_the_likeliest_tokens_of_all_sequences_get_the_room_there_is() -> None:
    few = Batching(block_size=8, max_batch_tokens=5)
    assert priced([offering(0, 0.6, 0.6, 0.6), offering(1, 0.92, 0.92, 0.92)], 0.1, few) == [0, 3]


def test_a_tenants_weight_is_what_its_tokens_are_worth() -> None:
    assert priced([offering(0, 0.5, weight=2.0), offering(1, 0.5), offering(2, 0.92, weight=0.5)], 0.6) == [1, 0, 0]


def test_rows_that_a_recorded_step_runs_anyway_are_free() -> None:
    def up_to_eight(num_rows: int, num_tokens: int) -> int:
        return 8 - num_tokens

    sequences = [offering(0, 0.3, 0.3), offering(1, 0.5, 0.5, 0.5, 0.5)]
    assert priced(sequences, 0.9) == [0, 0]
    assert priced(sequences, 0.9, num_free=up_to_eight) == [2, 4]
    assert priced([*sequences, offering(2, 0.1, 0.1), offering(3, 0.2)], 0.9, num_free=up_to_eight) == [1, 2, 0, 1]


def test_beside_a_chunk_of_a_prompt_no_row_is_free() -> None:
    planned = plan(
        [offering(0, 0.3), sequence(1, length=20, cached=0)],
        BATCHING,
        99,
        0,
        Pricing(0.9, PROVEN, lambda rows, tokens: 4),
    )
    assert [len(row.draft) for row in planned.rows] == [0, 0]


def test_in_ratio_mode_what_was_drawn_does_not_decide_whether_it_is_judged() -> None:
    point = DraftDistribution((7,), (Q_TOTAL,))

    def drawn(first: float, second: float) -> int:
        what = replace(opening([1] * 10, speculation=FOUR_AHEAD), params=DRAWN, mode=VerificationMode.RATIO)
        made = TargetSequence(SequenceKey(1, 0), 0, what, 512, Timer(0.0), SequenceDrafts.of(what, what.tokens))
        made.kv = EngineSequence(tokens=[1] * 9)
        made.drafts.offer(DraftTree(10, (7, 7), q=(point, point), chances=(first, second), source="model"))
        return priced([made], 0.4)[0]

    assert drawn(0.9, 0.01) == drawn(0.9, 0.99) == 2
    assert drawn(0.01, 0.99) == 1


def test_no_sequence_is_held_for_a_draft_that_nobody_would_judge() -> None:
    made = sequence(0, speculation=WAITING)
    assert plan([made], BATCHING, 9, 0.001, Pricing(0.9)).held
    assert not plan([made], BATCHING, 9, 0.001, Pricing(1.1)).held
