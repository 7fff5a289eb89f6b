"""More workers are wanted at once, fewer after a while."""

from __future__ import annotations

import pytest
from outrider_controller.autoscaler.sizing import Sizing, Utilisation, Wanted, sizing
from outrider_controller.autoscaler.tuning import LONG_S

IDLE = Utilisation(1, 0.1)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (Utilisation(2, 0.7), 2),
        (Utilisation(2, 0.95), 3),
        (Utilisation(4, 0.2), 4),
        (Utilisation(2, 0.1, late=0.5), 3),
        (Utilisation(1, 0.0), 1),
    ],
)
def test_drafts_that_are_busy_or_late_are_too_few(seen: Utilisation, wanted: int) -> None:
    assert sizing({"a@1": seen}, IDLE, Sizing(), 0.0).drafts["a@1"].workers == wanted


def test_fewer_are_wanted_only_when_fewer_would_have_done_for_minutes() -> None:
    last = sizing({}, Utilisation(4, 0.6), Sizing(), 0.0)
    assert last.routers.workers == 4
    for now_s in (1.0, LONG_S):
        last = sizing({}, Utilisation(4, 0.1), last, now_s)
        assert last.routers.workers == 4
    assert sizing({}, Utilisation(4, 0.1), last, LONG_S + 1.0).routers.workers == 1


def test_a_busy_minute_starts_the_wait_anew() -> None:
    last = sizing({}, Utilisation(4, 0.6), Sizing(), 0.0)
    last = sizing({}, Utilisation(4, 0.1), last, 1.0)
    last = sizing({}, Utilisation(4, 0.6), last, 200.0)
    last = sizing({}, Utilisation(4, 0.1), last, 201.0)
    assert sizing({}, Utilisation(4, 0.1), last, 400.0).routers.workers == 4


def test_as_many_stay_as_were_needed_at_any_time_of_the_wait() -> None:
    last = sizing({}, Utilisation(4, 0.7), Sizing(), 0.0)
    for now_s, busy in ((1.0, 0.5), (300.0, 0.4), (LONG_S + 1.0, 0.1)):
        last = sizing({}, Utilisation(4, busy), last, now_s)
    assert last.routers == Wanted(3)


def test_more_than_were_wanted_last_are_wanted_at_once_though_even_more_are_there() -> None:
    last = Sizing(routers=Wanted(2))
    assert sizing({}, Utilisation(4, 0.4), last, 1.0).routers == Wanted(3)
