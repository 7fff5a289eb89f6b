"""Whom a process takes that has nearly as many requests as it may, on a clock that a test moves."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from outrider.errors import Overloaded
from outrider.runtime.places import TenantPlaces


def entered(stack: ExitStack, places: TenantPlaces, tenant: str, count: int, weight: float = 1.0) -> int:
    """Of so many requests, those that were taken."""
    taken = 0
    for _ in range(count):
        try:
            stack.enter_context(places.hold(tenant, weight))
            taken += 1
        except Overloaded:
            pass
    return taken


def refused(places: TenantPlaces, tenant: str) -> float | None:
    """What the tenant is told, in seconds."""
    with pytest.raises(Overloaded) as caught, places.hold(tenant, 1.0):
        pass
    return caught.value.retry_after_s


def test_one_tenant_alone_has_all_places_but_those_that_whoever_comes_next_finds() -> None:
    places = TenantPlaces(100)
    with ExitStack() as stack:
        assert entered(stack, places, "a", 150) == places.taken == 94
        assert entered(stack, places, "b", 150) == 6
        assert places.taken == 100


def test_a_request_of_many_answers_needs_a_share_for_all_of_them() -> None:
    places = TenantPlaces(100)
    with ExitStack() as stack:
        stack.enter_context(places.hold("quiet", 1.0))
        stack.enter_context(places.hold("greedy", 1.0, 64))
        with pytest.raises(Overloaded):
            stack.enter_context(places.hold("greedy", 1.0, 32))
        stack.enter_context(places.hold("quiet", 1.0, 32))


def test_above_four_fifths_only_tenants_below_their_weighted_share_are_taken() -> None:
    places = TenantPlaces(100)
    with ExitStack() as stack:
        assert entered(stack, places, "greedy", 79) == 79
        assert entered(stack, places, "quiet", 1) == 1
        assert entered(stack, places, "greedy", 50) == 0
        assert entered(stack, places, "quiet", 50) == 20
        # All are taken, whoever asks.
        assert entered(stack, places, "third", 1) == 0


def test_a_share_follows_the_weight() -> None:
    places = TenantPlaces(100)
    with ExitStack() as stack:
        entered(stack, places, "light", 60)
        # Three quarters would be its own; the bound comes first.
        assert entered(stack, places, "heavy", 100, weight=3.0) == 40


def test_who_is_refused_is_told_when_requests_of_its_own_end_or_of_anybody_where_all_are_taken() -> None:
    now_s = 0.0
    places = TenantPlaces(10, lambda: now_s)
    with ExitStack() as stack:
        entered(stack, places, "a", 10)
        assert refused(places, "b") == 1.0
    assert places.taken == 0
    # Ten ended at once, and then one in four seconds.
    now_s = 44.0
    with ExitStack() as stack:
        with places.hold("a", 1.0):
            entered(stack, places, "a", 5)
        entered(stack, places, "b", 3)
        # Eleven in 44 s, of eight, of which five are its own.
        assert refused(places, "a") == pytest.approx(4.0 * 8 / 5)
        entered(stack, places, "b", 2)
        assert refused(places, "c") == pytest.approx(4.0)
        assert refused(places, "c") == pytest.approx(8.0)


def test_nothing_is_left_of_those_that_have_gone() -> None:
    places = TenantPlaces(10)
    with ExitStack() as stack:
        entered(stack, places, "a", 3, weight=0.1)
    with ExitStack() as stack:
        assert (places.taken, entered(stack, places, "b", 10)) == (0, 10)
