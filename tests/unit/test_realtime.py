"""A thread that asks to go first, where the system lets it and where it does not."""

from __future__ import annotations

import os
import threading

import pytest
from outrider.realtime import go_first


def in_a_thread(priority: int) -> tuple[bool, int, int]:
    """What go_first answered, and the thread's policy and priority afterwards."""
    seen: list[tuple[bool, int, int]] = []

    def run() -> None:
        went = go_first(priority)
        seen.append((went, os.sched_getscheduler(0), os.sched_getparam(0).sched_priority))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0]


def test_it_is_before_others_where_the_system_permits() -> None:
    went, policy, priority = in_a_thread(3)
    if not went:
        pytest.skip("no right to a real-time priority")
    assert (policy, priority) == (os.SCHED_FIFO, 3)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "only the thread that asked"


def test_without_the_right_all_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert in_a_thread(3) == (False, os.SCHED_OTHER, 0)


def test_nobody_who_did_not_ask_is_moved() -> None:
    assert in_a_thread(0) == (False, os.SCHED_OTHER, 0)


@pytest.mark.parametrize("priority", [-1, 100])
def test_a_priority_that_does_not_exist_is_refused(priority: int) -> None:
    with pytest.raises(ValueError, match="priority"):
        go_first(priority)
