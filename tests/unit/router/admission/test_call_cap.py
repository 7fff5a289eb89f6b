"""Whom a router takes that has nearly as many calls as it may."""

from __future__ import annotations

import pytest
from outrider_controller.router.admission.call_cap import CallCap


def entered(cap: CallCap, tenant: str, count: int, weight: float = 1.0) -> int:
    """Of so many calls, those that were taken."""
    taken = 0
    for _ in range(count):
        cap.enter(tenant, weight)
        if cap.takes(tenant):
            taken += 1
        else:
            cap.leave(tenant, None)
    return taken


def test_one_tenant_alone_has_every_call_and_no_more_than_there_may_be() -> None:
    cap = CallCap(100)
    assert entered(cap, "a", 150) == cap.num_calls == 100


def test_above_four_fifths_only_tenants_below_their_weighted_share_are_taken() -> None:
    cap = CallCap(100)
    assert entered(cap, "greedy", 79) == 79
    assert entered(cap, "quiet", 1) == 1
    assert entered(cap, "greedy", 50) == 0
    cap.enter("greedy", 1.0)
    assert cap.takes("greedy", begun=True)
    cap.leave("greedy", 1.0)
    assert entered(cap, "quiet", 50) == 20
    # All are taken, whoever asks.
    assert entered(cap, "third", 1) == 0


def test_a_share_follows_the_weight() -> None:
    cap = CallCap(100)
    entered(cap, "light", 60)
    # Three quarters would be its own; the cap comes first.
    assert entered(cap, "heavy", 100, weight=3.0) == 40


def test_who_is_refused_is_told_when_calls_of_its_own_end_or_at_the_cap_anybodys() -> None:
    cap = CallCap(10)
    entered(cap, "a", 1)
    cap.enter("a", 1.0)
    assert cap.wait_s("a") is None
    cap.leave("a", 8.0)
    entered(cap, "a", 6)
    entered(cap, "b", 1)
    cap.enter("a", 1.0)
    assert not cap.takes("a") and cap.wait_s("a") == pytest.approx(8 / 7)
    cap.leave("a", None)
    entered(cap, "b", 2)
    cap.enter("c", 1.0)
    assert not cap.takes("c") and cap.wait_s("c") == pytest.approx(8 / 10)


def test_nothing_is_left_of_those_that_have_gone() -> None:
    cap = CallCap(10)
    entered(cap, "a", 3, weight=0.1)
    for _ in range(3):
        cap.leave("a", 1.0)
    assert (cap.num_calls, entered(cap, "b", 10)) == (0, 10)
