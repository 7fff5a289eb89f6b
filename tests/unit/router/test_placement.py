"""Which workers can work together, and which is best."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.testing.fakes import fake_info
from outrider_controller.router.fleet import believed_load
from outrider_controller.router.placement import (
    Candidate,
    common_draft_limit,
    info_problem,
    pairing_problem,
    rank,
    verification_mode,
)

TARGET = fake_info(worker.WORKER_ROLE_TARGET, worker_id="t")


def candidate(worker_id: str, matched: int = 0, load: int = 0, limit: int = 10, waiting: int = 0) -> Candidate:
    return Candidate(worker_id, matched, load, limit, waiting)


def order(*candidates: Candidate) -> list[str]:
    return [c.worker_id for c in rank(candidates)]


def test_an_old_report_tells_only_who_is_leaving():
    load = worker.WorkerLoad(num_running=64, num_waiting=3, num_free_blocks=1, draining=True)
    fresh = LeaseRecord(TARGET, load, "127.0.0.1:7001", pid=1, age_ms=1800)
    assert believed_load(fresh) == load
    assert believed_load(replace(fresh, age_ms=2500)) == worker.WorkerLoad(draining=True)


def test_the_longest_cached_prefix_wins_then_the_least_load():
    assert order(candidate("a", 0, 0), candidate("b", 3, 5), candidate("c", 3, 2)) == ["c", "b", "a"]


def test_full_workers_are_left_out_and_queueing_ones_come_last():
    assert order(candidate("full", 9, 10), candidate("queue", 9, 5, waiting=1), candidate("c")) == ["c", "queue"]


def test_load_is_a_share_of_the_limit():
    assert order(candidate("small", load=5, limit=10), candidate("large", load=20, limit=100)) == ["large", "small"]


def test_of_drafts_about_as_busy_the_one_that_drafts_for_the_same_target_is_taken():
    idle, other = candidate("idle", load=20, limit=100), candidate("other", load=25, limit=100)
    same = replace(candidate("same", load=32, limit=100), num_together=7)
    assert order(idle, other, same) == ["same", "idle", "other"]
    assert order(idle, other, replace(same, num_sequences=33)) == ["idle", "other", "same"]
    assert order(idle, replace(other, matched_blocks=1), same) == ["other", "same", "idle"]


@pytest.mark.parametrize("field", ["protocol_version", "tokenizer_fingerprint", "vocab_size"])
def test_a_pair_that_cannot_work_is_told_what_differs(field):
    value = {"protocol_version": 2, "tokenizer_fingerprint": "other", "vocab_size": 7}[field]
    draft = fake_info(worker.WORKER_ROLE_DRAFT, worker_id="d", **{field: value})
    problem = pairing_problem(TARGET, draft)
    assert problem is not None and field in problem and repr(value) in problem
    assert sum(f in problem for f in ("protocol_version", "tokenizer_fingerprint", "vocab_size")) == 1


def test_a_fitting_pair_has_no_problem():
    assert pairing_problem(TARGET, fake_info(worker.WORKER_ROLE_DRAFT)) is None


def test_a_worker_is_who_its_lease_says_or_it_is_not_used():
    assert info_problem(TARGET, worker.WORKER_ROLE_TARGET, "t") is None
    assert "worker_id" in str(info_problem(TARGET, worker.WORKER_ROLE_TARGET, "x"))
    assert "role" in str(info_problem(TARGET, worker.WORKER_ROLE_DRAFT, "t"))
    for field in ("protocol_version", "vocab_size", "max_context_len"):
        broken = fake_info(worker.WORKER_ROLE_TARGET, worker_id="t", **{field: 0})
        assert field in str(info_problem(broken, worker.WORKER_ROLE_TARGET, "t"))


def test_the_mode_follows_temperature_seed_and_kind_of_draft():
    assert verification_mode(temperature=0, seeded=True, draft_kind="model") == sequence.VERIFICATION_MODE_GREEDY
    assert verification_mode(temperature=1, seeded=True, draft_kind="model") == sequence.VERIFICATION_MODE_COUPLED
    assert verification_mode(temperature=1, seeded=False, draft_kind="ngram") == sequence.VERIFICATION_MODE_COUPLED
    for kind in ("model", "combined", None):
        assert verification_mode(temperature=1, seeded=False, draft_kind=kind) == sequence.VERIFICATION_MODE_RATIO


def test_a_request_drafts_no_more_than_both_workers_can() -> None:
    target, draft = worker.WorkerInfo(max_draft_tokens=4), worker.WorkerInfo(max_draft_tokens=0)
    assert (common_draft_limit(5, target, draft), common_draft_limit(3, target, draft)) == (4, 3)
