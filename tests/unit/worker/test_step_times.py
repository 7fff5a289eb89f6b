"""What steps of different make-up say of a prompt token and of a row."""

from __future__ import annotations

import random

import pytest
from outrider.worker.step_times import StepTimes


def steps(times: StepTimes, count: int, prefill_s: float, row_s: float, base_s: float = 0.01) -> None:
    draw = random.Random(1)
    for _ in range(count):
        prompt, rows = draw.choice([0, 0, 0, 64, 256]), draw.randint(1, 32)
        times.took(prompt_tokens=prompt, rows=rows, seconds=base_s + prompt * prefill_s + rows * row_s)


def test_both_times_are_found_in_mixed_steps() -> None:
    times = StepTimes()
    steps(times, 300, prefill_s=50e-6, row_s=400e-6)
    assert times.prefill_token_ns == pytest.approx(50_000, rel=0.05)
    assert times.row_ns == pytest.approx(400_000, rel=0.05)


def test_a_worker_that_became_slower_says_so_after_some_hundred_steps() -> None:
    times = StepTimes()
    steps(times, 300, prefill_s=50e-6, row_s=400e-6)
    steps(times, 1500, prefill_s=100e-6, row_s=800e-6)
    assert times.prefill_token_ns == pytest.approx(100_000, rel=0.05)
    assert times.row_ns == pytest.approx(800_000, rel=0.05)


def test_steps_that_are_all_alike_give_every_token_its_share() -> None:
    times = StepTimes()
    for _ in range(50):
        times.took(prompt_tokens=0, rows=4, seconds=0.02)
    assert times.row_ns == times.prefill_token_ns == pytest.approx(5_000_000)


def test_without_a_step_nothing_is_known_and_never_is_a_time_negative() -> None:
    times = StepTimes()
    assert (times.prefill_token_ns, times.row_ns) == (0, 0)
    times.took(prompt_tokens=0, rows=0, seconds=0.5)
    times.took(prompt_tokens=0, rows=1, seconds=0.0)
    assert (times.prefill_token_ns, times.row_ns) == (0, 0)
    for rows, seconds in ((1, 0.3), (30, 0.1), (1, 0.3), (30, 0.1)):
        times.took(prompt_tokens=0, rows=rows, seconds=seconds)
    assert times.row_ns == 0 <= times.prefill_token_ns
