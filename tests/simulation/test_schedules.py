"""Random schedules of the whole protocol in virtual time.

A failure names the seed: `python -m tests.simulation --seed S --schedules 1 --trace` shows its events. The seeds are
always the same, so that a failure appears for everyone, with the change that caused it. `python -m tests.simulation
--seed N` runs others.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import draw, run_schedule
from tests.simulation.command import run_all, run_seeds

QUICK = 200
PART = 25
SCHEDULES = 2000
_LATER = range(PART, QUICK, PART)


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in _LATER)])
def test_no_schedule_breaks_a_promise(first: int) -> None:
    seeds = range(first, first + PART)
    outcomes = run_seeds(seeds)
    assert {outcome.seed: outcome.violations for outcome in outcomes if outcome.violations} == {}
    assert [outcome.seed for outcome in outcomes] == list(seeds)
    # Schedules without faults would pass without testing anything.
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    assert counts["accepted"] and counts["end: length"] and counts["openings with committed tokens"]


# Some 160 to 300 s of processor time, on all cores of a machine that may have other work.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_more_break_none() -> None:
    outcomes = run_all(QUICK, SCHEDULES - QUICK)
    assert {outcome.seed: outcome.violations for outcome in outcomes if outcome.violations} == {}
    assert [outcome.seed for outcome in outcomes] == list(range(QUICK, SCHEDULES))


def test_equal_seeds_give_equal_runs() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        run_schedule(draw(4), log.append)
    assert len(logs[0]) > 100
    assert logs[0] == logs[1]
