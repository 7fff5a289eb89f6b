"""What the benchmark of load makes of its blocks, and the target that runs every row."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.worker.step_cost import StepCost

from benchmarks.scenarios.load import Blocks, asked_of, reckoned_holds, verdict
from benchmarks.support.prompts import Prompt
from benchmarks.support.unpriced_target import BY_PRICE, EVERY_ROW, Pricing, read_line


def blocks(auto: list[int]) -> Blocks:
    found = Blocks()
    for tokens in auto:
        found.add("off", 100, 1.0)
        found.add("on", 80, 1.0)
        found.add("auto", tokens, 1.0)
    return found


def test_a_ratio_stands_between_the_bounds_of_its_blocks() -> None:
    low, ratio, high = blocks([90, 100, 110, 120, 80]).of_best()
    assert ratio == pytest.approx(1.0)
    assert 0.85 < low < 0.98 < 1.02 < high < 1.15
    assert blocks([99, 99]).of_best() == pytest.approx((0.99, 0.99, 0.99))


@pytest.mark.parametrize(
    ("low", "high", "says"), [(0.98, 1.1, "holds"), (0.9, 1.0, "open"), (0.8, 0.96, "does not hold")]
)
def test_a_verdict_is_open_where_the_interval_holds_the_bar(low: float, high: float, says: str) -> None:
    assert verdict(low, high) == says


@pytest.mark.parametrize(
    ("autos", "holds"), [([1.0, 1.06, 1.2], True), ([1.0, 1.2, 1.0], False), ([0.98, 1.2, 1.2], False)]
)
def test_reckoned_every_point_keeps_up_and_two_are_ahead(autos: list[float], holds: bool) -> None:
    assert reckoned_holds({n: {"off": 1.0, "on": 0.5, "auto": auto} for n, auto in enumerate(autos)}) is holds


def test_two_tenants_take_turns_with_as_many_prompts_each() -> None:
    inside, outside = ([Prompt(f"{name}{n}", "all", "text") for n in range(9)] for name in "io")
    asked = asked_of(inside, outside, 4)
    assert [tenant for tenant, _ in asked] == ["inside", "outside"] * 4
    assert all(prompt.id[0] == tenant[0] for tenant, prompt in asked)
    assert {tenant for tenant, _ in asked_of(inside, [], 4)} == {"inside"}


def test_the_target_runs_every_row_for_nothing_until_it_is_told_otherwise_and_writes_what_steps_cost(
    tmp_path: Path,
) -> None:
    cost, pricing = StepCost(), Pricing(tmp_path / "line")
    for number in range(400):
        rows = 1 + number % 16
        cost.took(rows=rows, seconds=0.010 + 0.001 * rows, tokens=rows)
    assert pricing.price(cost) == cost.price > 0
    pricing.switch(EVERY_ROW, None)
    assert pricing.price(cost) == 0.0
    pricing.switch(BY_PRICE, None)
    assert pricing.price(cost) == cost.price
    line = read_line(tmp_path / "line")
    assert [line.base_s, line.row_s] == pytest.approx([0.010, 0.001], rel=0.1)
