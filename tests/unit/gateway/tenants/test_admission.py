"""Who gets a gateway's places when they are few, on a clock that a test moves."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from outrider.errors import Overloaded
from outrider.gateway.tenants.admission import Admission, RefusalPace


def entered(stack: ExitStack, admission: Admission, tenant: str, weight: float = 1.0) -> int:
    """How many requests of the tenant are let in, one after another."""
    for count in range(1000):
        try:
            stack.enter_context(admission.enter(tenant, weight))
        except Overloaded:
            return count
    raise AssertionError("without end")


def test_the_last_fifth_is_for_tenants_below_their_shares() -> None:
    admission = Admission(100)
    with ExitStack() as stack:
        with admission.enter("b"):
            assert entered(stack, admission, "a") == 79
        assert entered(stack, admission, "b") == 21
        assert admission.running == 100
    assert admission.running == 0
    with ExitStack() as stack:
        # All but those that whoever comes next finds.
        assert entered(stack, admission, "a") == 94


def test_a_share_follows_the_weight() -> None:
    admission = Admission(120)
    with ExitStack() as stack:
        stack.enter_context(admission.enter("a", 1.0, 96))
        stack.enter_context(admission.enter("b", 3.0))
        assert entered(stack, admission, "a") == 0
        assert entered(stack, admission, "b", 3.0) == 23


def test_a_caller_on_many_connections_gets_its_refusals_one_after_another_and_no_other_waits() -> None:
    pace = RefusalPace()
    # Each connection asks again when it is refused.
    due = [pace.wait_s("greedy", 0.0) for _ in range(200)]
    num_sent = 0
    while (now_s := min(due)) < 20.0:
        due.remove(now_s)
        due.append(now_s + pace.wait_s("greedy", now_s))
        num_sent += 1
    assert num_sent == pytest.approx(20 * 50 + 20, abs=2)
    assert pace.wait_s("other", 20.0) == 0.0


def test_nobody_waits_for_a_refusal_longer_than_clients_do() -> None:
    pace = RefusalPace()
    waits = [pace.wait_s("a", 0.0) for _ in range(5000)]
    assert waits[:20] == pytest.approx([0.0] * 20)
    assert max(waits) == 10.0
    assert pace.wait_s("a", 30.0) == 0.0
