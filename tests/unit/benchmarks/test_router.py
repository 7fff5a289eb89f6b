"""What follows from a load, and what is found wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scenarios.router import Row, growth
from benchmarks.support.router_load import LoadFailed, percentiles


def row(sequences: int = 100, **changes: Any) -> Row:
    measured = {
        "sequences": sequences,
        "steps_per_s": 30.0,
        "window_s": 10.0,
        "steps": 600,
        "commits": 30 * 10 * sequences,
        "tokens": 90 * 10 * sequences,
        "router_cpu_s": 3.0,
        "fleet_cpu_s": 1.0,
        "messages": {"target to router": 600, "router to target": 300},
        "to_client_ms": {"p50": 1.0, "p99": 2.0, "max": 9.0},
    }
    return Row({**measured, **changes})


def test_costs_are_of_the_window() -> None:
    assert row().steps_per_s == pytest.approx(30)
    assert row().router_cores == pytest.approx(0.3)
    assert row().us_per_token == pytest.approx(3.0 / 90_000 * 1e6)
    assert row().messages_per_step("router to target") == 0.5
    assert row().messages_per_step("router to gateway") == 0
    assert row().problems() == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"router_cpu_s": 10.5}, "1.05 cores"),
        ({"commits": 20_000}, "20.0 steps/s"),
        ({"to_client_ms": {"p99": 5.1}}, "to_client_ms"),
    ],
)
def test_every_bound_is_checked(changes: dict[str, Any], named: str) -> None:
    (problem,) = row(**changes).problems()
    assert named in problem


def test_a_token_must_not_cost_more_among_many() -> None:
    assert growth([row(10, router_cpu_s=0.4), row(1000, router_cpu_s=30.0)]) == []
    assert len(growth([row(10, router_cpu_s=0.3), row(1000, router_cpu_s=31.0)])) == 1


def test_percentiles_are_of_what_arrived() -> None:
    assert percentiles([i / 1000 for i in range(1, 101)]) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    with pytest.raises(LoadFailed):
        percentiles([])
