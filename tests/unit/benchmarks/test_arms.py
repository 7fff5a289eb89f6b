"""What is judged of prompts answered both ways, and the stack it is measured in."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_controller.cli.client import Answer
from outrider_controller.cli.ports import Ports
from outrider_controller.cli.stack_config import Planner, StackConfig

from benchmarks.arms import Pair, compared, pair_cells


def pair(plain_s: float, auto_s: float, tokens: tuple[int, ...] = (1, 2)) -> Pair:
    return Pair(Answer("ab", [1, 2], seconds=plain_s), Answer("ab", list(tokens), seconds=auto_s))


def test_the_ratio_is_of_all_seconds_so_that_a_slow_prompt_counts_as_such():
    found = compared([pair(1.0, 0.5), pair(9.0, 9.5)], bound=0.98)
    assert (found["ratio"], found["median_ratio"]) == (1.0, pytest.approx((2 + 9 / 9.5) / 2, abs=1e-4))
    assert found["holds"] and pair_cells(found)[-1] == "holds"


def test_a_ratio_under_the_bound_and_a_text_that_differs_both_fall_short():
    assert not compared([pair(1.0, 1.1)], bound=0.95)["holds"]
    different = compared([pair(1.0, 0.5, tokens=(1, 3))], bound=0.95)
    assert not different["holds"] and different["texts_equal"] == 0


def test_a_delayed_stack_advertises_the_proxy_also_for_a_draft_that_takes_anothers_place():
    planner = Planner(StackConfig(delayed=True), Path("/m"), "redis://x", [0, 1])
    plan = planner.plan(Ports())
    (proxy,) = plan.proxies
    assert proxy in plan.tiers[0]
    for worker in (*plan.targets, *plan.drafts):
        advertised = worker.argv[worker.argv.index("--advertise") + 1]
        assert f"{advertised.rpartition(':')[2]}={worker.address}" in proxy.argv
    port = int(plan.drafts[0].address.rpartition(":")[2])
    other = planner.draft(0, port, "ngram", "m", change="wrong")
    assert "--advertise" in other.argv and "outrider.testing.changed_draft" in other.argv


def test_a_stack_without_delay_has_no_proxy():
    plan = Planner(StackConfig(), Path("/m"), "redis://x", [0, 1]).plan(Ports())
    assert not plan.proxies and "--advertise" not in plan.targets[0].argv
