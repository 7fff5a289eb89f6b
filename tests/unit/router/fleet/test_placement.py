"""Which workers can work together, and which is best."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.metadata import LeaseRecord
from outrider.options.sampling import VerificationMode
from outrider.rpc.v1 import target_pb2
from outrider.rpc.v1 import worker_pb2 as worker
from outrider_controller.plan_messages import MAX_PRICE
from outrider_controller.router.fleet.fleet import RowPrice
from outrider_controller.router.fleet.loads import load_of
from outrider_controller.router.fleet.placement import (
    MAX_ASKED,
    PlacementCandidate,
    asked,
    common_draft_limit,
    info_problem,
    rank,
)
from outrider_controller.router.request.checks import verification_mode

from tests.fakes import fake_info

TARGET = fake_info(worker.WORKER_ROLE_TARGET, worker_id="t")


def candidate(
    worker_id: str, load: int = 0, uncached: int = 0, limit: int = 10, waiting: int = 0
) -> PlacementCandidate:
    return PlacementCandidate(worker_id, load, limit, uncached, num_waiting=waiting)


def order(*candidates: PlacementCandidate, expected_tokens: int = 128) -> list[str]:
    return [c.worker_id for c in rank(candidates, expected_tokens)]


@pytest.mark.parametrize(("said", "taken"), [(float("nan"), 0), (-1, 0), (float("inf"), MAX_PRICE), (0.25, 0.25)])
def test_a_price_that_none_can_be_is_not_planned_with(said: float, taken: float) -> None:
    price = RowPrice()
    price.update(target_pb2.VerifyResponse(row_price=said, best_chance=said), 1.0)
    assert (price.row, price.best_chance) == (taken, min(taken, 1.0))


def test_an_old_report_tells_only_who_is_leaving() -> None:
    load = worker.WorkerLoad(num_running=64, num_waiting=3, num_free_blocks=1, draining=True)
    fresh = LeaseRecord(TARGET, load, "127.0.0.1:7001", pid=1, age_ms=1800)
    assert load_of(fresh) == load
    assert load_of(replace(fresh, age_ms=2500)) == worker.WorkerLoad(draining=True)


def test_a_cached_prefix_is_worth_the_time_that_it_saves_and_no_more() -> None:
    # 128 tokens of an answer take as long as 128 of a prompt where nothing is known.
    assert order(candidate("a", load=3, uncached=0), candidate("b", load=2, uncached=100)) == ["b", "a"]
    assert order(candidate("a", load=3, uncached=0), candidate("b", load=2, uncached=200)) == ["a", "b"]


def test_the_longer_the_answer_the_less_a_cached_prefix_counts_against_load() -> None:
    cached, idle = candidate("cached", load=3, uncached=0), candidate("idle", load=2, uncached=100)
    assert order(cached, idle, expected_tokens=50) == ["cached", "idle"]
    assert order(cached, idle, expected_tokens=500) == ["idle", "cached"]


def test_thirty_two_streams_with_one_prompt_are_spread_over_targets_of_which_one_has_it() -> None:
    loads = {"primed": 0, "cold": 0}
    for _ in range(32):
        uncached = {"primed": 0, "cold": 0 if loads["cold"] else 2000}
        best = order(*(candidate(name, loads[name], uncached[name], limit=64) for name in loads))[0]
        loads[best] += 1
    assert 12 <= loads["cold"] <= 20


def test_a_faster_worker_takes_more() -> None:
    fast = replace(candidate("fast", load=4), prefill_token_ns=10_000, row_ns=100_000)
    slow = replace(candidate("slow", load=3), prefill_token_ns=20_000, row_ns=200_000)
    assert order(slow, fast) == ["fast", "slow"]
    # Who has said nothing yet is taken for what the others are.
    assert order(slow, candidate("new", load=3), fast) == ["fast", "new", "slow"]


def test_full_workers_are_left_out() -> None:
    assert order(candidate("full", 10), candidate("c", 9)) == ["c"]


def test_a_sequence_that_waits_costs_as_much_again_as_one_that_runs() -> None:
    queue = candidate("queue", 6, waiting=1)
    assert order(candidate("busy", 9), queue) == ["queue", "busy"]
    assert order(queue, candidate("busy", 6)) == ["busy", "queue"]
    assert order(candidate("long queue", 6, waiting=4), candidate("busy", 9)) == ["busy", "long queue"]


def test_of_drafts_about_as_busy_the_one_that_drafts_for_the_same_target_is_taken() -> None:
    idle, other = candidate("idle", load=20, limit=100), candidate("other", load=25, limit=100)
    same = replace(candidate("same", load=39, limit=100), num_together=7)
    assert order(idle, other, same) == ["same", "idle", "other"]
    assert order(idle, other, replace(same, num_sequences=41)) == ["idle", "other", "same"]


def test_few_caches_are_asked_however_many_workers_there_are() -> None:
    for count in (1, 8, 9, 500):
        fleet = [candidate(f"w{number}", load=number % 5) for number in range(count)]
        chosen = asked(b"block", fleet, 128)
        assert len(chosen) == len(set(chosen)) == min(count, MAX_ASKED)


def test_prompts_with_one_beginning_meet_the_same_workers_whatever_their_load() -> None:
    fleet = [candidate(f"w{number}", load=number % 5) for number in range(100)]
    busier = [replace(one, num_sequences=(7 * one.num_sequences + 3) % 9) for one in fleet]
    assert len(set(asked(b"block", fleet, 128)) & set(asked(b"block", busier, 128))) >= MAX_ASKED // 2
    assert set(asked(b"block", fleet, 128)[: MAX_ASKED // 2]) != set(asked(b"other", fleet, 128)[: MAX_ASKED // 2])


def test_a_worker_is_who_its_lease_says_or_it_is_not_used() -> None:
    assert info_problem(TARGET, worker.WorkerLoad(), worker.WORKER_ROLE_TARGET, "t") is None
    assert "worker_id" in str(info_problem(TARGET, worker.WorkerLoad(), worker.WORKER_ROLE_TARGET, "x"))
    assert "role" in str(info_problem(TARGET, worker.WorkerLoad(), worker.WORKER_ROLE_DRAFT, "t"))
    for field in ("protocol_version", "vocab_size", "max_context_len"):
        broken = fake_info(worker.WORKER_ROLE_TARGET, worker_id="t", **{field: 0})
        assert field in str(info_problem(broken, worker.WorkerLoad(), worker.WORKER_ROLE_TARGET, "t"))


def test_the_mode_follows_temperature_and_seed() -> None:
    assert verification_mode(temperature=0, seeded=True) == VerificationMode.GREEDY
    assert verification_mode(temperature=1, seeded=True) == VerificationMode.COUPLED
    assert verification_mode(temperature=1, seeded=False) == VerificationMode.RATIO


def test_a_request_drafts_no_more_than_both_workers_can() -> None:
    for most, other, common in ((4, 0, 4), (4, 3, 3), (0, 2, 2)):
        target, draft = worker.WorkerInfo(max_draft_tokens=most), worker.WorkerInfo(max_draft_tokens=other)
        assert common_draft_limit(target, draft) == common
    assert common_draft_limit(worker.WorkerInfo(), worker.WorkerInfo()) == MAX_DRAFT_TOKENS
