"""Ends the process when a step never returns, or when every step fails: its streams break, and routers move its
sequences to other workers.

Nothing else would end it: while a step hangs, the event loop still reports the worker as healthy. One that fails every
step looks idle, and draws all traffic.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
"""Exit code of a worker that cannot go on: what supervises it starts it again."""

_PERIOD_S = 0.25
_TIMES_THE_LONGEST = 20.0
MIN_S = 3.0
MIN_ON_GPU_S = 20.0
"""On a GPU a step may wait for a kernel that is compiled at its first use."""


class StepPace:
    """How long a step may last: twenty times the estimated time of the largest step, from the steps so far.

    Written by one thread, read by any."""

    def __init__(self, max_tokens: int, least_s: float = MIN_S) -> None:
        """`max_tokens`: most tokens of a step."""
        self._max_tokens = max_tokens
        self._least_s = least_s
        self._longest_s = 0.0
        self._most_tokens = 0

    def stepped(self, seconds: float, num_tokens: int) -> None:
        self._longest_s = max(self._longest_s, seconds)
        self._most_tokens = max(self._most_tokens, num_tokens)

    def limit_s(self, most_s: float) -> float:
        """In seconds; at most `most_s`, which also holds before the first step."""
        if not self._most_tokens:
            return most_s
        # The next step may be of the largest size, and take proportionally longer than those so far.
        largest_s = self._longest_s * max(1.0, self._max_tokens / self._most_tokens)
        return min(most_s, max(self._least_s, _TIMES_THE_LONGEST * largest_s))


class StepTimeout:
    """How long one step has lasted, counting only time in which this process ran: being stopped by a signal or starved
    of CPU does not count."""

    def __init__(self, limit_s: Callable[[], float], period_s: float = _PERIOD_S) -> None:
        self._limit_s = limit_s
        self._period_s = period_s
        self._begun_s: float | None = None
        self._looked_s = 0.0
        self._lasted_s = 0.0

    def ends(self, begun_s: float | None, now_s: float) -> bool:
        """Whether the step that began at `begun_s` (None: there is none) has lasted too long. Called once per
        period."""
        if begun_s is None or begun_s != self._begun_s:
            self._lasted_s = 0.0
        else:
            self._lasted_s += min(now_s - self._looked_s, 2 * self._period_s)
        self._begun_s, self._looked_s = begun_s, now_s
        return self._lasted_s > self._limit_s()


def end_process(limit_s: float) -> None:
    """For a step that does not return. Writes a traceback of each thread."""
    _end(f"a step takes longer than {limit_s:g} s")


def end_broken(problem: str, error: Exception) -> None:
    """For a worker whose steps all fail."""
    _end(problem, error)


def _end(reason: str, error: Exception | None = None) -> None:
    """At once, skipping everything that could block."""
    log.error("%s: this worker ends", reason, exc_info=error)
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

    `busy_since_s`: when the current step began, in monotonic seconds; None between steps.
    """
    over = threading.Event()

    def watch() -> None:
        timeout = StepTimeout(limit_s)
        while not over.wait(_PERIOD_S):
            if timeout.ends(busy_since_s(), time.monotonic()):
                end(limit_s())
                return

    thread = threading.Thread(target=watch, name="outrider-step-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
