"""How long a wait for a draft is worth it."""

from __future__ import annotations

from outrider.sequence.speculation import worthwhile_wait_us


def test_a_wait_is_worth_half_of_the_steps_it_saves() -> None:
    worth = worthwhile_wait_us(cap_us=50_000, accepted_per_step=1.5, step_us=20_000, turnaround_us=15_000)
    assert worth == 30_000
    assert worthwhile_wait_us(cap_us=10_000, accepted_per_step=1.5, step_us=20_000, turnaround_us=500) == 10_000
    assert worthwhile_wait_us(cap_us=50_000, accepted_per_step=1.5, step_us=20_000, turnaround_us=15_001) == 0


def test_nothing_is_waited_for_while_it_is_unknown_how_long_that_would_be() -> None:
    assert worthwhile_wait_us(cap_us=50_000, accepted_per_step=2, step_us=0, turnaround_us=99) == 0
    assert worthwhile_wait_us(cap_us=50_000, accepted_per_step=2, step_us=20_000, turnaround_us=0) == 0
