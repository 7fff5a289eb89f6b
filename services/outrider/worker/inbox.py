"""Events that the threads of a process pass to the one that owns the state."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

E = TypeVar("E")


class Inbox(Generic[E]):
    """Any thread posts; one thread waits and takes. In order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds, the time base of `wait`."""
        self._clock = clock
        self._posted: queue.SimpleQueue[list[E] | None] = queue.SimpleQueue()
        self._kept: list[E] = []
        self._stopped = False

    def post(self, events: Iterable[E]) -> None:
        """Queues events that belong together. Never blocks."""
        if not (posted := list(events)):
            return
        self._posted.put(posted)
        # Lets the other thread begin now instead of when this one next waits: they share the GIL, and often a core.
        os.sched_yield()

    def stop(self) -> None:
        self._posted.put(None)

    def wait(self, until_s: float | None) -> list[E] | None:
        """Sleeps until there are events or `until_s` has come. Returns all events; None once stopped."""
        if not self._kept and not self._stopped:
            timeout_s = None if until_s is None else max(0.0, until_s - self._clock())
            with suppress(queue.Empty):
                self._keep(self._posted.get(timeout=timeout_s))
        self._take_posted()
        if self._stopped:
            return None
        events, self._kept = self._kept, []
        return events

    def _take_posted(self) -> None:
        while not self._posted.empty():
            self._keep(self._posted.get())

    def _keep(self, events: list[E] | None) -> None:
        if events is None:
            self._stopped = True
        else:
            self._kept += events
