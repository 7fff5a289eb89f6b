"""The step loop on its own thread: apply what came in, draft, hand out what came of it; sleep when nothing is due.

The thread owns the drafter. Everyone else talks to it through `post`.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable

from outrider.draft.events import Event
from outrider.draft.report import Load, Report
from outrider.draft.worker import DraftWorker

log = logging.getLogger(__name__)

Deliver = Callable[[Report], None]
"""Called on the step thread after each round that has something to say. Must not block."""

_PAUSE_AFTER_FAULT_S = 0.05


class StepLoop:
    """Runs a worker until stopped."""

    def __init__(self, worker: DraftWorker, deliver: Deliver) -> None:
        self.load: Load = worker.load
        """As of the last round. May be read from any thread."""
        self._worker = worker
        self._deliver = deliver
        self._inbox: deque[Event] = deque()
        self._wake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="outrider-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the round it is in."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()

    def post(self, events: Iterable[Event]) -> None:
        """Queues events for the next round, all of them for the same one. Wakes the thread. Never blocks."""
        with self._wake:
            self._inbox.extend(events)
            self._wake.notify()

    def _run(self) -> None:
        while (events := self._wait()) is not None:
            self._turn(events)

    def _wait(self) -> list[Event] | None:
        """Sleeps until there is something to do; None once stopped."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._stopped or self._worker.has_work)
            if self._stopped:
                return None
            events = list(self._inbox)
            self._inbox.clear()
            return events

    def _turn(self, events: list[Event]) -> None:
        started_s = time.monotonic()
        try:
            for event in events:
                self._worker.apply(event)
            self._worker.step()
        except Exception as error:
            # A fault outside any one sequence. All of them are told; the worker itself goes on.
            log.error("step loop: %s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
            self._worker.fail_all(error)
            threading.Event().wait(_PAUSE_AFTER_FAULT_S)
        self.load = self._worker.load
        if report := self._worker.take_report():
            report.round_s = time.monotonic() - started_s
            self._deliver(report)
