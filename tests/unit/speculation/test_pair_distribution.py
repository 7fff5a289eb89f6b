"""With drafter, draft worker and target worker in the loop, ratio mode follows the target's distribution too."""

from __future__ import annotations

import pytest

from benchmarks.support.distribution import Fault
from benchmarks.support.pair_distribution import Conditions, run_pair_experiment

# Seconds of processor time, on a machine where others may have the processor.
pytestmark = pytest.mark.timeout(300)

# Most planted faults show in so few.
QUICK = 1_000


@pytest.mark.parametrize(
    ("conditions", "draws"),
    [
        (Conditions.PRICED, QUICK // 2),
        *(pytest.param(conditions, 20_000, marks=pytest.mark.slow) for conditions in Conditions),
    ],
)
def test_what_two_workers_say_together_follows_the_target(conditions: Conditions, draws: int) -> None:
    result = run_pair_experiment(draws=draws, conditions=conditions)
    assert result.passed, result
    assert 0.7 < result.accepted < 1


@pytest.mark.parametrize(
    ("fault", "conditions", "draws"),
    [
        pytest.param(Fault.MATCH_TAKES_OVER, Conditions.CROSSING, 4 * QUICK, marks=pytest.mark.slow),
        pytest.param(Fault.LENGTH_FOLLOWS_THE_DRAW, Conditions.BORDERLINE, QUICK, marks=pytest.mark.slow),
        (Fault.PRICED_BY_THE_DRAW, Conditions.PRICED, 700),
    ],
)
def test_a_planted_fault_is_found(fault: Fault, conditions: Conditions, draws: int) -> None:
    result = run_pair_experiment(draws=draws, conditions=conditions, fault=fault)
    assert not result.passed, result
