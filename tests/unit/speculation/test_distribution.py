"""Ratio mode follows the target's distribution, and the experiment that says so can tell."""

from __future__ import annotations

import pytest
from outrider.speculation import VerificationMode

from benchmarks.support.distribution import Fault, run_experiment


def test_plain_sampling_follows_the_target() -> None:
    assert run_experiment(speculate=False, draws=30_000).passed


@pytest.mark.timeout(300)
def test_two_hundred_thousand_speculated_draws_follow_the_target() -> None:
    result = run_experiment(draws=200_000)
    assert result.passed, result
    assert 0.3 < result.accepted < 0.9  # both the accepting and the recovering branch were exercised


def test_draws_judged_for_the_last_position_follow_the_target() -> None:
    result = run_experiment(draws=60_000, late=True)
    assert result.passed, result


def test_coupled_draws_follow_the_target() -> None:
    result = run_experiment(VerificationMode.COUPLED, draws=30_000)
    assert result.passed, result
    assert result.accepted > 0.3


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
def test_a_planted_fault_is_found(fault: Fault) -> None:
    # A fifth of the draws finds it; the command line runs the whole number.
    result = run_experiment(draws=40_000, fault=fault)
    assert not result.passed, result
