"""python -m tests.soak soak: its requests, and what it calls a problem."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.support.lines import least_squares
from tests.soak.soak import Soaked, make_request, memory_growth, problems

FLAT = least_squares([0, 10], [1e9, 1e9])


def soaked(**changes: object) -> Soaked:
    good: dict[str, object] = {
        "outcomes": Counter(complete=80, cancelled=20),
        "preemptions": 3,
        "evictions": 40,
        "held": {"target": 0, "draft": 0},
    }
    return Soaked(**{**good, **changes})  # type: ignore[arg-type]


def test_requests_fit_the_model_share_beginnings_and_one_in_five_is_cancelled() -> None:
    rng = random.Random(0)
    made = [make_request(number, rng) for number in range(2000)]
    assert all(0 < len(r.prompt_token_ids) + r.stopping.max_new_tokens <= 240 for r, _ in made)
    assert all(cancel is None or cancel < request.stopping.max_new_tokens for request, cancel in made)
    assert 0.17 < sum(cancel is not None for _, cancel in made) / len(made) < 0.23
    beginnings = Counter(tuple(request.prompt_token_ids[:96]) for request, _ in made)
    assert sum(count > 20 for count in beginnings.values()) == 12


def test_a_good_soak_has_no_problems() -> None:
    assert problems(soaked(), FLAT, 80) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"errors": Counter({"INTERNAL: no": 2})}, "2 × INTERNAL: no"),
        ({"outcomes": Counter(complete=79, cancelled=20, short=1)}, "before their time"),
        ({"outcomes": Counter(complete=100)}, "nothing was cancelled"),
        ({"preemptions": 0}, "no preemptions"),
        ({"evictions": 0}, "no evictions"),
        ({"held": {"target": 0, "draft": 2}}, "draft: 2 KV blocks"),
        ({"still_open": 1}, "1 sequences are still open"),
    ],
)
def test_each_thing_that_must_not_be_is_told(changes: dict[str, object], told: str) -> None:
    [problem] = problems(soaked(**changes), FLAT, 80)
    assert told in problem


def test_memory_is_judged_after_the_warm_up() -> None:
    rss = [(10, 100), (50, 900), (60, 1000), (80, 1000), (100, 1000)]
    assert memory_growth(rss, 60).slope == 0
    assert memory_growth(rss, 10).slope > 0


def test_memory_that_grows_with_every_request_is_a_problem() -> None:
    growing = least_squares([0, 80], [100e6, 104e6])
    [problem] = problems(soaked(), growing, 80)
    assert "memory grew by 4.0 MB over 80 requests" in problem
    assert problems(soaked(), least_squares([0, 80], [100e6, 102e6]), 80) == []
