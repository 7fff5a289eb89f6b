"""Which workers can work together, and which is best."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.errors import Code
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.testing.fakes import fake_info
from outrider_controller.router.choice import Candidate, believed_load, rank
from outrider_controller.router.faults import Fault, Loss, UnreachablePairs, fault_of, loss_of
from outrider_controller.router.pairing import info_problem, pairing_problem, verification_mode

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


def test_only_faults_of_the_request_reach_the_client():
    assert fault_of(Code.INVALID_ARGUMENT) is Fault.REQUEST
    assert fault_of(Code.RESOURCE_EXHAUSTED) is Fault.FULL
    assert fault_of(Code.UNAVAILABLE) is Fault.LEAVING
    assert fault_of(Code.INTERNAL) is fault_of(Code.UNKNOWN) is Fault.WORKER


def test_a_target_s_word_on_a_draft_says_what_was_lost() -> None:
    assert loss_of("DRAFT_UNREACHABLE", names_field=False) is Loss.UNREACHABLE
    assert loss_of("DRAFT_GONE", names_field=False) is Loss.WORKER
    assert loss_of("INVALID_FIELD", names_field=True) is Loss.MALFORMED
    assert loss_of("OVERLOADED", names_field=False) is Loss.ERROR


def test_a_draft_that_a_target_cannot_reach_is_left_alone_by_that_target_longer_each_time() -> None:
    pairs, now_s, waits = UnreachablePairs(1.0), 0.0, []
    for _ in range(8):
        pairs.failed("t", "d", now_s)
        start_s = now_s
        while pairs.avoids("t", "d", now_s):
            now_s += 0.5
        waits.append(now_s - start_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    pairs.failed("t", "d", now_s)
    assert not pairs.avoids("t", "other", now_s) and not pairs.avoids("other", "d", now_s)


def test_many_sequences_that_one_break_ended_count_as_one_break() -> None:
    pairs = UnreachablePairs(1.0)
    for _ in range(64):
        pairs.failed("t", "d", 10.0)
    assert pairs.avoids("t", "d", 10.9) and not pairs.avoids("t", "d", 11.0)


def test_a_break_long_ago_is_forgotten() -> None:
    pairs = UnreachablePairs(1.0)
    for now_s in (0.0, 1.5, 500.0):
        pairs.failed("t", "d", now_s)
    assert not pairs.avoids("t", "d", 501.5)


def test_only_so_many_pairs_are_remembered() -> None:
    pairs = UnreachablePairs(1.0)
    for number in range(3000):
        pairs.failed("t", f"d{number}", 0.0)
    assert len(pairs._pairs) <= 1024 and pairs.avoids("t", "d2999", 0.5)
