"""A step that never returns ends its process; a slow machine, or a signal that stops it, does not."""

from __future__ import annotations

import threading

from outrider.worker.watchdog import StepPace, StepTimeout, ending_hung_steps


def looks(timeout: StepTimeout, begun_s: float | None, times: list[float]) -> list[bool]:
    return [timeout.ends(begun_s, now_s) for now_s in times]


def test_a_step_may_last_so_long_and_no_longer() -> None:
    timeout = StepTimeout(lambda: 1.0, period_s=0.25)
    assert looks(timeout, 0.0, [0.25, 0.5, 0.75, 1.0, 1.25]) == [False] * 5
    assert timeout.ends(0.0, 1.5)


def test_many_steps_may_last_for_ever() -> None:
    timeout = StepTimeout(lambda: 1.0, period_s=0.25)
    assert not any(timeout.ends(now_s - 0.1, now_s) for now_s in (n * 0.25 for n in range(100)))


def test_idling_is_no_step() -> None:
    timeout = StepTimeout(lambda: 1.0, period_s=0.25)
    assert not any(looks(timeout, None, [n * 0.25 for n in range(100)]))


def test_a_stopped_process_is_given_the_time_that_it_lost() -> None:
    timeout = StepTimeout(lambda: 1.0, period_s=0.25)
    assert looks(timeout, 0.0, [0.25, 30.0, 30.25]) == [False, False, False]
    assert looks(timeout, 0.0, [30.5, 30.75]) == [False, True]


def test_a_hung_step_ends_the_process_once_and_a_quick_one_never() -> None:
    ended: list[float] = []
    hung = threading.Event()

    def end(limit_s: float) -> None:
        ended.append(limit_s)
        hung.set()

    with ending_hung_steps(lambda: 0.0, lambda: 0.1, end):
        assert hung.wait(60)
    with ending_hung_steps(lambda: None, lambda: 0.1, end):
        pass
    assert ended == [0.1]


def test_a_step_may_last_as_long_as_configured_before_there_was_one() -> None:
    assert StepPace(512).limit_s(60) == 60


def test_a_step_may_last_twenty_times_what_the_largest_would_take_and_never_less_than_three_seconds() -> None:
    pace = StepPace(512)
    pace.stepped(0.01, 1)
    assert pace.limit_s(60) == 60, "a whole prompt may come next, and be as slow a token"
    pace.stepped(0.1, 512)
    assert pace.limit_s(60) == 3
    pace.stepped(0.5, 300)
    assert pace.limit_s(60) == 10
    assert pace.limit_s(7) == 7
    pace.stepped(30, 512)
    assert pace.limit_s(60) == 60
