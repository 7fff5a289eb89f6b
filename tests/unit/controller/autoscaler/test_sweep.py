"""The plan second by second, in virtual time: near the crossing it stays where it is, and a shift it follows."""

from __future__ import annotations

import itertools

import pytest
from outrider_controller.autoscaler.estimator import SavingEstimator
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Mode, Plan, plan

from tests.unit.controller.autoscaler.virtual_plan import FLEET, KEY, planned, swinging

_QUICK = {(1, 20), (8, 150), (32, 600)}


@pytest.mark.parametrize(
    ("streams", "period_s"),
    [
        pytest.param(*case, marks=() if case in _QUICK else pytest.mark.slow)
        for case in itertools.product((1, 8, 32), (20, 60, 150, 600))
    ],
)
def test_load_that_swings_about_the_crossing_changes_the_mode_twice_at_most(streams: int, period_s: int) -> None:
    for seed in range(2):
        ran = planned(swinging(period_s), 600, streams=streams, seed=seed)
        assert ran.changes <= 2
        assert ran.of_best >= 0.99


def test_a_shift_of_the_text_is_followed_both_ways() -> None:
    ran = planned(lambda second: -0.8 if 100 <= second < 200 else 0.8, 400)
    assert ran.changes == 2
    assert ran.modes[99] is Mode.ON
    assert ran.modes[115] is Mode.TRY
    # Only one request in forty tries.
    assert ran.modes[260] is Mode.ON
    assert ran.of_best > 1


@pytest.mark.parametrize("saving", [-1.0, -0.3, -0.1, 0.1, 0.6])
def test_a_tenant_is_never_far_from_the_better_of_always_and_never(saving: float) -> None:
    assert planned(lambda second: saving, 300).of_best >= 0.985


def test_who_was_away_comes_back_in_its_mode() -> None:
    estimator, last = SavingEstimator(), Plan()
    for second in range(30):
        estimator.learn({KEY: Evidence(100, 120, -60.0, 160.0)})
        last = plan(estimator, {}, FLEET, last, float(second))
    for second in range(30, 3600, 60):
        estimator.learn({EvidenceKey("other", "target", "draft@1"): Evidence(1000, 3000, 900.0, 1810.0)})
        last = plan(estimator, {}, FLEET, last, float(second))
    decision = last.decision(Cell("acme", "target"))
    assert decision is not None
    assert decision.mode is Mode.TRY
