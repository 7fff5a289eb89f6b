"""Whose fault a loss was, whom a request avoids after it, and when it is given up. No event loop is needed."""

from __future__ import annotations

import pytest
from outrider.errors import Code
from outrider_controller.router.config import FailoverConfig
from outrider_controller.router.request.failover import FailoverState, Fault, Loss, UnreachablePairs, fault_of, loss_of

CONFIG = FailoverConfig(max_target_failures=2, max_lost_connections=3, max_draft_failures=4)


def state() -> FailoverState:
    return FailoverState(CONFIG, "weights/arithmetic")


def test_only_faults_of_the_request_reach_the_client() -> None:
    assert fault_of(Code.INVALID_ARGUMENT) is Fault.REQUEST
    assert fault_of(Code.RESOURCE_EXHAUSTED) is Fault.FULL
    assert fault_of(Code.UNAVAILABLE) is Fault.LEAVING
    assert fault_of(Code.INTERNAL) is fault_of(Code.UNKNOWN) is Fault.WORKER


def test_a_target_that_failed_is_a_last_resort_and_one_that_is_full_or_leaving_is_none() -> None:
    failover = state()
    for key, fault in (("a", Fault.WORKER), ("b", Fault.CONNECTION), ("c", Fault.FULL), ("d", Fault.LEAVING)):
        failover.target_lost((key, 1), fault)
    assert failover.failed_targets == {("a", 1), ("b", 1)}
    assert failover.excluded_targets == {("c", 1), ("d", 1)}
    assert (failover.target_failures, failover.lost_connections) == (1, 1)


@pytest.mark.parametrize(("fault", "most"), [(Fault.WORKER, 2), (Fault.CONNECTION, 3)])
def test_a_request_is_given_up_after_so_many_targets_failed_with_it(fault: Fault, most: int) -> None:
    failover = state()
    for number in range(most):
        assert not failover.gives_up
        failover.target_lost((str(number), 1), fault)
    assert failover.gives_up and failover.num_failures == most


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.LEAVING])
def test_a_request_is_not_blamed_for_targets_that_are_full_or_leave(fault: Fault) -> None:
    failover = state()
    for number in range(20):
        failover.target_lost((str(number), 1), fault)
    assert not failover.gives_up and not failover.suspects_network


def test_a_second_lost_connection_may_be_the_network_s() -> None:
    failover = state()
    failover.target_lost(("a", 1), Fault.CONNECTION)
    assert not failover.suspects_network
    failover.target_lost(("b", 1), Fault.CONNECTION)
    assert failover.suspects_network


def test_a_target_that_carries_a_request_for_a_while_clears_it() -> None:
    failover = state()
    failover.target_lost(("a", 1), Fault.WORKER)
    failover.target_opened()
    for _ in range(7):
        failover.round_committed()
    assert failover.num_failures == 1
    failover.round_committed()
    assert failover.num_failures == 0
    assert failover.failed_targets, "it is asked again only where there is no other"


def test_rounds_on_the_target_before_do_not_count() -> None:
    failover = state()
    failover.target_lost(("a", 1), Fault.WORKER)
    for _ in range(3):
        failover.target_opened()
        for _ in range(7):
            failover.round_committed()
    assert failover.num_failures == 1


def test_a_draft_is_avoided_for_what_it_said_and_not_for_its_connection() -> None:
    failover = state()
    for worker_id, loss in (("a", Loss.ERROR), ("b", Loss.MALFORMED), ("c", Loss.WORKER), ("d", Loss.UNREACHABLE)):
        failover.draft_lost(worker_id, loss)
    assert failover.avoided_drafts == {"a", "b"}


def test_a_request_goes_on_without_after_it_lost_so_many_drafts() -> None:
    failover = state()
    for _ in range(20):
        failover.draft_lost("d", Loss.UNREACHABLE)
    assert failover.may_draft, "nothing is known against it"
    for _ in range(4):
        assert failover.may_draft
        failover.draft_lost("d", Loss.WORKER)
    assert not failover.may_draft


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
