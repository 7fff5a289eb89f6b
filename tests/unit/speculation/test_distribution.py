"""Ratio mode follows the target's distribution, and the experiment that says so can tell."""

from __future__ import annotations

import pytest
from outrider.speculation import VerificationMode

from benchmarks.support.distribution import Fault, run_experiment

# Seconds of processor time, on a machine where others may have the processor.
pytestmark = pytest.mark.timeout(300)

# Every planted fault shows in so few with p < 1e-6: a bias as large as theirs would, too. More find smaller ones.
QUICK = 5_000


def slow(condition: object) -> object:
    return pytest.param(condition, marks=pytest.mark.slow)


# What is drawn with speculation follows the target only if this does.
@pytest.mark.parametrize("draws", [slow(30_000)])
def test_plain_sampling_follows_the_target(draws: int) -> None:
    assert run_experiment(speculate=False, draws=draws).passed


@pytest.mark.parametrize("draws", [QUICK, slow(200_000)])
def test_speculated_draws_follow_the_target(draws: int) -> None:
    result = run_experiment(draws=draws)
    assert result.passed, result
    assert 0.3 < result.accepted < 0.9  # both the accepting and the recovering branch were exercised


# With few draws, and options beside: tests/unit/speculation/test_options_distribution.py.
@pytest.mark.slow
def test_coupled_draws_follow_the_target() -> None:
    result = run_experiment(VerificationMode.COUPLED, draws=30_000)
    assert result.passed, result
    assert result.accepted > 0.3


@pytest.mark.parametrize("fault", [Fault.NOISE_REUSED, *map(slow, (Fault.Q_TRUNCATED, Fault.RECOVERY_FROM_P))])
def test_a_planted_fault_is_found(fault: Fault) -> None:
    result = run_experiment(draws=QUICK, fault=fault)
    assert not result.passed, result
