"""What a row more takes is seen from steps of different sizes."""

from __future__ import annotations

import random

import pytest
from outrider.target.step_cost import StepCost


def after(share: float, *, steps: int = 400, noise: float = 0.0, tokens: int = 2) -> StepCost:
    """Steps of 1 to 8 rows; one of 4 takes 10 ms, and each row more or less `share` of that."""
    cost, rng = StepCost(), random.Random(1)
    for _ in range(steps):
        rows = rng.randint(1, 8)
        seconds = 0.010 * (1 + share * (rows - 4)) + rng.gauss(0, noise)
        cost.took(rows=rows, seconds=seconds, tokens=tokens)
    return cost


@pytest.mark.parametrize("share", [0.0, 0.02, 0.12])
def test_a_rows_share_is_learned(share: float) -> None:
    assert after(share).row_share == pytest.approx(share, rel=0.1, abs=0.006)
    assert after(share, noise=0.0005).row_share == pytest.approx(share, abs=0.015)


def test_before_steps_differ_what_is_usual_holds() -> None:
    assert StepCost().row_share == 0.05
    cost = StepCost()
    for _ in range(50):
        cost.took(rows=4, seconds=0.01, tokens=2)
    assert cost.row_share == pytest.approx(0.05)


def test_steps_that_take_less_the_more_rows_they_have_make_a_row_free_and_no_less() -> None:
    assert after(-0.05).row_share == 0.0


def test_a_row_has_to_bring_what_the_step_brings_in_its_time() -> None:
    alone, full = after(0.1, tokens=2), after(0.1, tokens=32)
    assert alone.least_chance == pytest.approx(2 * alone.row_share)
    assert full.least_chance > 1


def test_no_time_at_all_says_nothing() -> None:
    cost = StepCost()
    cost.took(rows=4, seconds=0.0, tokens=2)
    assert cost.row_share == 0.05
