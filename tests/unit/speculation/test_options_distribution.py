"""Penalties and masks leave the distribution that they define, with drafts in every step; and faults of them show."""

from __future__ import annotations

import pytest
from outrider.speculation import VerificationMode

from benchmarks.support.distribution import Fault
from benchmarks.support.options_distribution import Asked, run_options_experiment

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("asked", "mode", "draws"),
    [
        (Asked.PENALTIES, VerificationMode.RATIO, 1_500),
        (Asked.MASKS, VerificationMode.COUPLED, 1_500),
        *(
            pytest.param(asked, mode, 10_000, marks=pytest.mark.slow)
            for asked in Asked
            for mode in (VerificationMode.RATIO, VerificationMode.COUPLED)
        ),
    ],
)
def test_speculated_draws_follow_the_target(asked: Asked, mode: VerificationMode, draws: int) -> None:
    result = run_options_experiment(asked, mode, draws=draws)
    assert result.passed, result
    assert 0.3 < result.accepted < 0.9


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        pytest.param(Asked.PENALTIES, Fault.STATE_BY_STEPS, marks=pytest.mark.slow),
        (Asked.PENALTIES, Fault.REJECTED_COUNTED),
        pytest.param(Asked.PENALTIES, Fault.MASK_OF_ANOTHER_POSITION, marks=pytest.mark.slow),
        pytest.param(Asked.MASKS, Fault.STATE_BY_STEPS, marks=pytest.mark.slow),
        pytest.param(Asked.MASKS, Fault.MASK_OF_ANOTHER_POSITION, marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found(asked: Asked, fault: Fault) -> None:
    assert not run_options_experiment(asked, VerificationMode.RATIO, draws=1_500, fault=fault).passed
