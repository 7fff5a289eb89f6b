"""What is judged of prompts answered both ways, and the stack it is measured in."""

from __future__ import annotations

import pytest
from outrider_controller.cli.client import Answer

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
