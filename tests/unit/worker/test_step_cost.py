"""What a row more takes, and a token of a prompt, is seen from steps of different make-up."""

from __future__ import annotations

import random

import pytest
from outrider.worker.step_cost import StepCost


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
    assert StepCost().row_share == pytest.approx(1 / 20)
    cost = StepCost()
    for _ in range(50):
        cost.took(rows=4, seconds=0.01, tokens=2)
    assert cost.row_share == pytest.approx(1 / 23)


def test_a_step_is_expected_to_take_no_longer_than_the_last_one() -> None:
    cost = StepCost()
    cost.took(rows=4, seconds=30.0)
    for _ in range(20):
        # Half of what is expected is waited for, at least what a step takes.
        cost.took(rows=4, seconds=max(0.01, cost.step_s / 2))
    assert cost.step_s == 0.01


def test_steps_that_take_less_the_more_rows_they_have_make_a_row_free_and_no_less() -> None:
    assert after(-0.05).row_share == 0.0


def test_a_row_has_to_bring_what_the_step_brings_in_its_time() -> None:
    alone, full = after(0.1, tokens=2), after(0.1, tokens=32)
    assert alone.price == pytest.approx(2 * alone.row_share)
    assert full.price > 1


@pytest.mark.parametrize("streams", [1, 8, 64])
def test_a_first_drafted_token_that_is_all_but_sure_is_tried_before_anything_is_known(streams: int) -> None:
    cost = StepCost()
    for _ in range(50):
        cost.took(rows=streams, seconds=0.01, tokens=streams)
    assert cost.price < 0.8


def test_no_row_costs_more_than_its_share_of_a_step_however_steps_scatter() -> None:
    cost, rng = StepCost(), random.Random(3)
    for _ in range(400):
        rows = rng.randint(30, 34)
        cost.took(rows=rows, seconds=max(0.001, 0.01 * (rows - 31)), tokens=rows)
    assert cost.price <= 1.0 + 1e-9


def test_no_time_at_all_says_nothing() -> None:
    cost = StepCost()
    cost.took(rows=4, seconds=0.0, tokens=2)
    assert cost.row_share == pytest.approx(1 / 20)


def test_what_a_row_costs_is_not_forgotten_while_steps_are_alike() -> None:
    cost = after(0.12)
    for _ in range(1000):
        cost.took(rows=4, seconds=0.010, tokens=4)
    assert cost.row_share == pytest.approx(0.12, abs=0.02)


def test_where_steps_get_smaller_a_row_is_a_greater_part_of_one() -> None:
    cost = after(0.05)
    for _ in range(300):
        cost.took(rows=1, seconds=0.010 * (1 - 0.05 * 3), tokens=1)
    assert cost.row_share == pytest.approx(0.05 / 0.85, rel=0.15)


def test_a_cost_that_changes_is_learned_anew() -> None:
    cost, rng = after(0.02), random.Random(2)
    for _ in range(600):
        rows = rng.randint(1, 8)
        cost.took(rows=rows, seconds=0.010 * (1 + 0.15 * (rows - 4)), tokens=2)
    assert cost.row_share == pytest.approx(0.15, abs=0.02)


def mixed(cost: StepCost, count: int, prefill_s: float, row_s: float, base_s: float = 0.01) -> None:
    draw = random.Random(1)
    for _ in range(count):
        prompt, rows = draw.choice([0, 0, 0, 64, 256]), draw.randint(1, 32)
        cost.took(prompt_tokens=prompt, rows=rows, seconds=base_s + prompt * prefill_s + rows * row_s)


def test_both_times_are_found_in_mixed_steps() -> None:
    cost = StepCost()
    mixed(cost, 300, prefill_s=50e-6, row_s=400e-6)
    assert cost.prompt_token_s == pytest.approx(50e-6, rel=0.05)
    assert cost.row_s == pytest.approx(400e-6, rel=0.05)


def test_a_worker_that_became_slower_says_so_after_some_hundred_steps() -> None:
    cost = StepCost()
    mixed(cost, 300, prefill_s=50e-6, row_s=400e-6)
    mixed(cost, 1500, prefill_s=100e-6, row_s=800e-6)
    assert cost.prompt_token_s == pytest.approx(100e-6, rel=0.05)
    assert cost.row_s == pytest.approx(800e-6, rel=0.05)


def test_a_prompt_that_took_long_does_not_change_what_a_row_costs() -> None:
    cost = after(0.05)
    price = cost.price
    cost.took(rows=2, prompt_tokens=512, seconds=3.0, tokens=2)
    assert cost.price == price


def test_without_a_step_no_time_is_known_and_never_is_one_negative() -> None:
    cost = StepCost()
    assert (cost.prompt_token_s, cost.row_s) == (0, 0)
    cost.took(rows=0, seconds=0.5)
    cost.took(rows=1, seconds=0.0)
    assert (cost.prompt_token_s, cost.row_s) == (0, 0)
    for rows, seconds in ((1, 0.3), (30, 0.1), (1, 0.3), (30, 0.1)):
        cost.took(rows=rows, seconds=seconds)
    cost.took(rows=30, prompt_tokens=8, seconds=0.01)
    assert cost.row_s == cost.prompt_token_s == 0


@pytest.mark.parametrize("seconds", [0.001, 0.02, 5.0])
def test_a_steps_time_is_divided_among_its_sequences_without_a_rest(seconds: float) -> None:
    cost = StepCost()
    mixed(cost, 300, prefill_s=50e-6, row_s=400e-6)
    parts = [(0, 1), (0, 5), (256, 0), (31, 2)]
    shares = cost.shares(sequences=4, rows=8, prompt_tokens=287, seconds=seconds)
    assert sum(shares.of(prompt_tokens=prompt, rows=rows) for prompt, rows in parts) == pytest.approx(seconds)
    assert shares.of(prompt_tokens=0, rows=5) - shares.of(prompt_tokens=0, rows=1) == pytest.approx(4 * shares.row_s)


def test_before_anything_is_known_the_sequences_of_a_step_share_it_alike() -> None:
    shares = StepCost().shares(sequences=4, rows=7, prompt_tokens=0, seconds=0.02)
    assert shares.of(prompt_tokens=0, rows=1) == shares.of(prompt_tokens=0, rows=4) == 0.005
