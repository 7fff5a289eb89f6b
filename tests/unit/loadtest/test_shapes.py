"""How many users a shape wants."""

from __future__ import annotations

import pytest

from loadtest.outcomes import Outcome, Slo
from loadtest.shapes import Burst, Ramp, Shape, Steady, Threshold

SLO = Slo(ttft_ms=100)
GOOD, BAD = Outcome("a", 0.0, ttft_ms=50), Outcome("a", 0.0, ttft_ms=500)


@pytest.mark.parametrize("shape", [Steady(4, 60), Ramp(1, 9, 60), Burst(1, 5, 20, 5, 60)])
def test_a_shape_ends_when_its_time_is_over(shape: Shape) -> None:
    assert shape.users(59.9, [], SLO) is not None
    assert shape.users(60, [], SLO) is None


def test_a_ramp_rises_evenly() -> None:
    assert [Ramp(1, 9, 80).users(at_s, [], SLO) for at_s in (0, 20, 40, 79.9)] == [1, 3, 5, 9]


def test_a_burst_comes_at_the_end_of_each_period() -> None:
    burst = Burst(num_users=2, burst_users=16, every_s=30, burst_s=10, seconds=120)
    assert [burst.users(at_s, [], SLO) for at_s in (0, 19.9, 20, 29.9, 30, 50)] == [2, 2, 16, 16, 2, 16]


def test_a_threshold_rises_while_the_slo_is_met_and_keeps_what_it_held() -> None:
    shape = Threshold(from_users=2, step_users=3, step_s=10, max_users=20, min_goodput=0.9)
    assert shape.users(0, [], SLO) == 2
    assert shape.users(9.9, [BAD], SLO) == 2
    assert shape.users(10, [GOOD] * 9 + [BAD], SLO) == 5
    assert shape.users(15, [BAD], SLO) == 5
    assert shape.users(20, [GOOD] * 8 + [BAD] * 2, SLO) is None
    assert shape.held == 2


def test_a_threshold_ends_where_nothing_is_answered() -> None:
    shape = Threshold(from_users=2, step_users=3, step_s=10, max_users=20)
    shape.users(0, [], SLO)
    assert shape.users(10, [], SLO) is None
    assert shape.held == 0


def test_a_threshold_ends_at_its_most_users() -> None:
    shape = Threshold(from_users=2, step_users=3, step_s=10, max_users=5)
    assert shape.users(10, [GOOD], SLO) == 5
    assert shape.users(20, [GOOD], SLO) is None
    assert shape.held == 5
