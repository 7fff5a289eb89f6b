"""Where a round's time went: durations only, each draft charged once, what is unknown is 0."""

from __future__ import annotations

from outrider.protocol.rounds import Round
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.router.legs import Legs


def draft(base_len: int, count: int, **fields: object) -> sequence.Draft:
    return sequence.Draft(base_len=base_len, token_ids=[1] * count, **fields)


def forward(legs: Legs, message: sequence.Draft, now_us: int) -> None:
    legs.forward(message, message.base_len, len(message.token_ids), now_us)


def commit(legs: Legs, base_len: int, count: int, now_us: int, step_us: int = 100, **fields: int) -> Round:
    done = Round.from_commit(sequence.Commit(base_len=base_len, token_ids=[1] * count, **fields), step_us)
    legs.commit(done, committed_len=base_len + count, now_us=now_us)
    return done


def test_the_first_round_is_queue_prefill_step_and_wire():
    legs = Legs(opened_us=1000)
    timing = commit(legs, 10, 1, 2000, queue_us=300, prefill_us=400)
    assert (timing.round_us, timing.queue_us, timing.prefill_us, timing.verify_us) == (1000, 300, 400, 100)
    assert timing.wire_us == 200
    assert (timing.draft_us, timing.compute_us, timing.wait_us) == (0, 0, 0)


def test_wire_is_both_round_trips_less_what_the_workers_spent():
    legs = Legs(opened_us=0)
    commit(legs, 10, 1, 1000)
    legs.asked(11, 1000)
    # 900 µs until the draft is back, of which the draft worker had it for 600.
    message = draft(11, 3, draft_us=600, compute_us=500, source="model")
    forward(legs, message, 1900)
    assert message.serial == 1
    # 1000 µs until the commit: 250 in the target's buffer, 500 in its step.
    timing = commit(
        legs, 11, 2, 2900, step_us=500, num_drafted=3, num_accepted=1, draft_serial=1, draft_queue_us=250, wait_us=7,
        queue_us=9,
    )  # fmt: skip
    assert timing.wire_us == (900 - 600) + (1000 - 250 - 500)
    assert (timing.draft_us, timing.compute_us, timing.round_us) == (600, 500, 1900)
    assert (timing.wait_us, timing.queue_us) == (7, 9)


def test_a_guess_made_unasked_has_no_way_from_the_commit():
    legs = Legs(opened_us=0)
    legs.asked(11, 1000)
    forward(legs, draft(11, 1, draft_us=10, run_ahead=True), 1900)
    timing = commit(legs, 11, 2, 2000, step_us=60, num_drafted=1, num_accepted=1, draft_serial=1, draft_queue_us=30)
    assert timing.wire_us == 100 - 90


def test_every_draft_is_charged_to_the_first_round_that_judged_a_part_of_it():
    legs = Legs(opened_us=0)
    forward(legs, draft(10, 3, compute_us=5), 10)
    forward(legs, draft(13, 2, compute_us=7, run_ahead=True), 20)
    forward(legs, draft(15, 1, compute_us=9, run_ahead=True), 30)
    first = commit(legs, 10, 4, 100, num_drafted=4, num_accepted=4, draft_serial=2)
    second = commit(legs, 14, 2, 200, num_drafted=2, num_accepted=2, draft_serial=3)
    assert (first.compute_us, second.compute_us) == (12, 9)


def test_a_guess_that_was_taken_back_is_charged_to_nobody():
    legs = Legs(opened_us=0)
    forward(legs, draft(10, 3, epoch=0, compute_us=5), 10)
    forward(legs, draft(10, 3, epoch=1, compute_us=7), 20)
    assert commit(legs, 10, 2, 100, num_drafted=2, num_accepted=2, draft_serial=2).compute_us == 7


def test_what_comes_too_late_for_a_round_is_not_charged_to_it():
    legs = Legs(opened_us=0)
    forward(legs, draft(10, 2, compute_us=5), 10)
    forward(legs, draft(11, 3, compute_us=7), 95)
    timing = commit(legs, 10, 2, 100, num_drafted=2, num_accepted=1, draft_serial=1)
    assert timing.compute_us == 5


def test_a_target_that_names_no_serial_is_charged_by_position():
    legs = Legs(opened_us=0)
    forward(legs, draft(3, 1, compute_us=1), 10)
    forward(legs, draft(4, 2, compute_us=70), 20)
    assert commit(legs, 4, 2, 100, num_drafted=2, num_accepted=1).compute_us == 70


def test_another_target_counts_anew():
    legs = Legs(opened_us=0)
    commit(legs, 10, 1, 100)
    forward(legs, draft(11, 2), 110)
    legs.opened(5000)
    message = draft(11, 2)
    forward(legs, message, 5010)
    assert message.serial == 1
    assert commit(legs, 11, 1, 6000, queue_us=100, prefill_us=700).wire_us == 100


def test_clocks_that_do_not_agree_give_no_negative_time():
    legs = Legs(opened_us=0)
    legs.asked(10, 50)
    forward(legs, draft(10, 1, draft_us=10**6), 60)
    timing = commit(legs, 10, 1, 70, step_us=10**6, num_drafted=1, draft_serial=1, draft_queue_us=2**32 - 1)
    assert timing.wire_us == 0
