"""What a measurement changes in a stack's command lines, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan, StackPlanner

from benchmarks.support.stacks import changed_draft, delayed, with_options


def plan() -> StackPlan:
    return StackPlanner(StackConfig(), Path("/m"), "redis://x", [0, 1]).plan(Ports())


def test_workers_of_a_delayed_stack_advertise_the_proxy_that_passes_on_to_them() -> None:
    found = delayed(plan(), Ports())
    (proxy,) = found.others
    assert proxy in found.tiers[0]
    for worker in (*found.targets, *found.drafts):
        advertised = worker.argv[worker.argv.index("--advertise") + 1]
        assert f"{advertised.rpartition(':')[2]}={worker.address}" in proxy.argv


def test_a_draft_that_takes_anothers_place_is_reached_as_that_one_was() -> None:
    old = delayed(plan(), Ports()).drafts[0]
    wrong = changed_draft(old, "m", "/m", "wrong")
    assert wrong.argv[2:4] == ("benchmarks.support.changed_draft", "wrong")
    assert wrong.argv[-2:] == old.argv[-2:] and wrong.address == old.address
    good = changed_draft(wrong, "n", "/n")
    assert good.argv[2:7] == ("outrider.draft", "--model", "/n", "--model-name", "n")


def test_a_stack_that_nobody_amends_has_no_proxy() -> None:
    assert not plan().others and "--advertise" not in plan().targets[0].argv


def test_an_option_that_a_command_line_does_not_have_cannot_be_changed() -> None:
    with pytest.raises(ValueError):
        with_options(("python", "--model", "m"), execution="native")
