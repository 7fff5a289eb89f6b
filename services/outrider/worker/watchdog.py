"""Ends the process whose step never returns: its streams break, and routers move its sequences to others.

Nothing else would: while a step hangs, the event loop goes on saying that the worker is well.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.engine.parallel.watchdog import EXIT_BROKEN

log = logging.getLogger(__name__)

_PERIOD_S = 0.25
_TIMES_THE_LONGEST = 20.0
MIN_S = 3.0
MIN_ON_GPU_S = 20.0
"""A step may wait there for a kernel that is compiled as it is first needed."""


class StepPace:
    """How long a step may last, by what steps have lasted so far: some twenty times what the largest one would take.

    Written by one thread, read by any."""

    def __init__(self, max_tokens: int, least_s: float = MIN_S) -> None:
        """`max_tokens`: of a step."""
        self._max_tokens = max_tokens
        self._least_s = least_s
        self._longest_s = 0.0
        self._most_tokens = 0

    def stepped(self, seconds: float, num_tokens: int) -> None:
        self._longest_s = max(self._longest_s, seconds)
        self._most_tokens = max(self._most_tokens, num_tokens)

    def limit_s(self, most_s: float) -> float:
        """`most_s` at most, and as long as there was no step."""
        if not self._most_tokens:
            return most_s
        # Before a step was as large as steps may be, the next may be, and take as much longer.
        largest_s = self._longest_s * max(1.0, self._max_tokens / self._most_tokens)
        return min(most_s, max(self._least_s, _TIMES_THE_LONGEST * largest_s))


class Patience:
    """How long one step has been seen to last, in time in which this process ran: one that is stopped by a signal, or
    starved, sees its steps last no longer for it."""

    def __init__(self, limit_s: Callable[[], float], period_s: float = _PERIOD_S) -> None:
        self._limit_s = limit_s
        self._period_s = period_s
        self._begun_s: float | None = None
        self._looked_s = 0.0
        self._lasted_s = 0.0

    def ends(self, begun_s: float | None, now_s: float) -> bool:
        """Whether the step that began at `begun_s` (None: there is none) has lasted too long. Asked each period."""
        if begun_s is None or begun_s != self._begun_s:
            self._lasted_s = 0.0
        else:
            self._lasted_s += min(now_s - self._looked_s, 2 * self._period_s)
        self._begun_s, self._looked_s = begun_s, now_s
        return self._lasted_s > self._limit_s()


def end_process(limit_s: float) -> None:
    """At once, past everything that could wait; with where each thread was."""
    log.error("a step takes longer than %g s: this worker ends", limit_s)
    logging.shutdown()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_BROKEN)


@contextmanager
def ending_hung_steps(
    busy_since_s: Callable[[], float | None],
    limit_s: Callable[[], float],
    end: Callable[[float], None] = end_process,
) -> Iterator[None]:
    """Within the block a thread calls `end` once a step lasts longer than `limit_s`.

    `busy_since_s`: when the step under way began, in monotonic seconds; None while there is none.
    """
    over = threading.Event()

    def watch() -> None:
        patience = Patience(limit_s)
        while not over.wait(_PERIOD_S):
            if patience.ends(busy_since_s(), time.monotonic()):
                end(limit_s())
                return

    thread = threading.Thread(target=watch, name="outrider-step-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
