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


class Patience:
    """How long one step has been seen to last, in time in which this process ran: one that is stopped by a signal, or
    starved, sees its steps last no longer for it."""

    def __init__(self, limit_s: float, period_s: float = _PERIOD_S) -> None:
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
        return self._lasted_s > self._limit_s


def end_process(limit_s: float) -> None:
    """At once, past everything that could wait; with where each thread was."""
    log.error("a step takes longer than %g s: this worker ends", limit_s)
    logging.shutdown()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_BROKEN)


@contextmanager
def ending_hung_steps(
    busy_since_s: Callable[[], float | None], limit_s: float, end: Callable[[float], None] = end_process
) -> Iterator[None]:
    """Within the block a thread calls `end` once a step lasts longer than `limit_s`.

    `busy_since_s`: when the step under way began, in monotonic seconds; None while there is none.
    """
    over = threading.Event()

    def watch() -> None:
        patience = Patience(limit_s)
        while not over.wait(_PERIOD_S):
            if patience.ends(busy_since_s(), time.monotonic()):
                end(limit_s)
                return

    thread = threading.Thread(target=watch, name="outrider-step-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
