"""Random schedules of the whole protocol in virtual time. A failure names the seed: `outrider bench simulation --seed S
--schedules 1 --trace` shows all that happened in it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from outrider_controller.simulation import draw, run_schedule

SCHEDULES = 250
CHUNK = 25


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_no_schedule_breaks_a_promise(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        outcome = run_schedule(draw(seed))
        assert not outcome.violations, f"seed {seed}: {outcome.violations}"
        counts.update(outcome.counts)
    # Schedules in which nothing happens would break nothing either.
    assert counts["accepted"] and counts["end: length"] and counts["openings with committed tokens"]


def test_equal_seeds_give_equal_runs() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        run_schedule(draw(3), log.append)
    assert len(logs[0]) > 100
    assert logs[0] == logs[1]
