"""python -m benchmarks rounds: what is compared, and when it holds."""

from __future__ import annotations

import pytest

from benchmarks.scenarios.rounds import Decoded, summary


def decoded(tokens: int, rounds: int, seconds: float) -> Decoded:
    return Decoded(tuple(range(tokens)), rounds, seconds)


@pytest.mark.parametrize(
    ("apart_s", "in_step_s", "one_s", "holds"),
    [(1.0, 1.2, 1.0, True), (1.05, 1.3, 1.0, True), (1.07, 1.3, 1.0, False), (1.0, 1.1, 1.0, False)],
)
def test_a_round_is_held_against_one_process_and_speed_against_rounds_in_step(
    apart_s: float, in_step_s: float, one_s: float, holds: bool
) -> None:
    times = {"apart": apart_s, "in step": in_step_s, "one": one_s}
    result = summary({arm: [decoded(21, 10, seconds)] * 2 for arm, seconds in times.items()})
    assert result["holds"] is holds
    assert result["round_over_one_process"] == pytest.approx(apart_s / one_s, abs=1e-4)
    assert result["in_step_over_one_process"] == pytest.approx(in_step_s / one_s, abs=1e-4)
    assert result["speed_over_in_step"] == pytest.approx(in_step_s / apart_s, abs=1e-2)
    assert result["arms"]["apart"]["tokens_per_round"] == 2.0
    assert result["texts_equal"] == 2


def test_a_text_counts_as_equal_only_when_it_is_in_all_three() -> None:
    same, other = decoded(5, 2, 1.0), Decoded((9, 9, 9, 9, 9), 2, 1.0)
    result = summary({"apart": [same, same], "in step": [same, other], "one": [same, same]})
    assert (result["texts_equal"], result["num_prompts"]) == (1, 2)
