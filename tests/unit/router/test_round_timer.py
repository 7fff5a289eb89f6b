"""How long a round took, and its way: durations only."""

from __future__ import annotations

from outrider.protocol.rounds import Round
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.router.requests.sequences import RoundTimer


def commit(timer: RoundTimer, now_us: int, step_us: int = 100, **fields: int) -> Round:
    done = Round.from_commit(sequence.Commit(base_len=10, token_ids=[1], **fields), step_us)
    timer.commit(done, now_us)
    return done


def test_the_first_round_is_queue_prefill_step_and_wire() -> None:
    timing = commit(RoundTimer(opened_us=1000), 2000, queue_us=300, prefill_us=400)
    assert (timing.round_us, timing.queue_us, timing.prefill_us, timing.verify_us) == (1000, 300, 400, 100)
    assert timing.wire_us == 200
    assert (timing.draft_us, timing.compute_us, timing.wait_us) == (0, 0, 0)


def test_after_that_the_way_is_what_the_target_saw_of_its_draft() -> None:
    timer = RoundTimer(opened_us=0)
    commit(timer, 1000)
    timing = commit(timer, 2900, draft_stats=sequence.DraftStats(draft_us=600, compute_us=500, wire_us=70))
    assert (timing.round_us, timing.draft_us, timing.compute_us, timing.wire_us) == (1900, 600, 500, 70)


def test_another_target_counts_anew() -> None:
    timer = RoundTimer(opened_us=0)
    commit(timer, 100)
    timer.opened(5000)
    assert commit(timer, 6000, queue_us=100, prefill_us=700).wire_us == 100


def test_clocks_that_do_not_agree_give_no_negative_time() -> None:
    assert commit(RoundTimer(opened_us=60), 70, step_us=10**6).wire_us == 0
