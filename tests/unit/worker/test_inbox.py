"""Between threads: in order, together, within a time, and at once when it ends."""

from __future__ import annotations

import threading
import time

from outrider.worker.loop import Inbox


def test_what_was_posted_comes_in_order() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.post([1, 2])
    inbox.post([])
    inbox.post([3])
    assert inbox.wait(None) == [1, 2, 3]


def test_it_waits_until_the_time_and_no_longer() -> None:
    inbox: Inbox[int] = Inbox()
    until_s = time.monotonic() + 0.05
    assert inbox.wait(until_s) == []
    assert time.monotonic() >= until_s
    assert inbox.wait(until_s) == []


def test_a_post_from_another_thread_wakes_it() -> None:
    inbox: Inbox[int] = Inbox()
    threading.Timer(0.05, inbox.post, [[1]]).start()
    assert inbox.wait(None) == [1]


def test_once_stopped_nothing_comes_any_more() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.post([1])
    inbox.stop()
    assert inbox.wait(None) is None
    threading.Timer(0.05, inbox.stop).start()
    assert inbox.wait(None) is None
