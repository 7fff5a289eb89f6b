"""What the overload benchmark makes of how requests ended."""

from __future__ import annotations

import pytest

from benchmarks.scenarios.overload import Load
from benchmarks.support.open_loop import percentile_ms

GOOD = Load(
    factor=5,
    offered=100,
    goodput=19,
    codes={"OK": 190, "RESOURCE_EXHAUSTED": 810},
    refused_p50_ms=3,
    refused_p99_ms=20,
    without_retry_after=0,
    first_token_p99_ms=2000,
    late_p99_ms=1,
    memory_mib={"gateway": 90, "router": 80},
)


def test_what_keeps_to_every_bar_has_no_problem() -> None:
    assert GOOD.problems(peak=20) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"goodput": 17}, "goodput is 0.85"),
        ({"refused_p99_ms": 51}, "51 ms"),
        ({"without_retry_after": 1}, "without a retry-after"),
        ({"codes": {"OK": 1, "CANCELLED": 1}}, "CANCELLED"),
    ],
)
def test_each_bar_that_is_missed_is_named(changed: dict[str, object], says: str) -> None:
    fields = {name: getattr(GOOD, name) for name in GOOD.__slots__}
    (problem,) = Load(**{**fields, **changed}).problems(peak=20)
    assert says in problem and problem.startswith("5 x")


def test_a_percentile_is_the_nearest_rank() -> None:
    assert percentile_ms([0.001 * n for n in range(1, 101)], 0.99) == 99
    assert percentile_ms([], 0.99) is None
