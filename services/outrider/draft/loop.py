"""The step loop on its own thread: apply what came in, draft, hand out what came of it; sleep when nothing is due.

The thread owns the drafter. Everyone else talks to it through `post`.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from outrider.draft.events import Event
from outrider.draft.report import Load, Report
from outrider.draft.worker import DraftWorker
from outrider.rpc.inbox import Inbox

log = logging.getLogger(__name__)

Deliver = Callable[[Report], None]
"""Called on the step thread after each round that has something to say. Must not block."""

_PAUSE_AFTER_FAULT_S = 0.05
# A system that lets who computes finish its turn of some milliseconds would keep what was just said from being sent,
# where a worker has a single core. Nobody waits for what is guessed ahead.
_BEFORE_RUNNING_AHEAD_S = 0.0005


class Steps(Protocol):
    """What runs a worker's rounds, as the service sees it."""

    @property
    def load(self) -> Load:
        """As of the last round. May be read from any thread."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """Ends after the round under way."""
        ...

    def post(self, events: Iterable[Event]) -> None:
        """Queues events for the next round, all of them for the same one. Never blocks."""
        ...


MakeSteps = Callable[[DraftWorker, Deliver], Steps]


class StepLoop:
    """Runs a worker until stopped."""

    def __init__(self, worker: DraftWorker, deliver: Deliver, clock: Callable[[], float] = time.monotonic) -> None:
        self.load: Load = worker.load
        self._worker = worker
        self._deliver = deliver
        self._clock = clock
        self._inbox: Inbox[Event] = Inbox(clock)
        self._thread = threading.Thread(target=self._run, name="outrider-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the round it is in."""
        self._inbox.stop()
        self._thread.join()

    def post(self, events: Iterable[Event]) -> None:
        """Queues events for the next round, all of them for the same one. Wakes the thread. Never blocks."""
        self._inbox.post(events)

    def _run(self) -> None:
        wake_at_s: float | None = None
        while (events := self._inbox.wait(wake_at_s)) is not None:
            wake_at_s = self.turn(events)

    def turn(self, events: Iterable[Event]) -> float | None:
        """Applies events, runs one round, hands out the report. Returns when it is due again: 0 for at once, None for
        when something comes in, else monotonic seconds.

        For whoever runs the loop: the thread, or a simulation of it.
        """
        started_s = self._clock()
        pause_s, said = 0.0, False
        try:
            for event in events:
                self._worker.apply(event)
            self._worker.step()
        except Exception as error:
            # A fault outside any one sequence. All of them are told; the worker itself goes on.
            log.error("step loop: %s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
            self._worker.fail_all(error)
            pause_s = _PAUSE_AFTER_FAULT_S
        self.load = self._worker.load
        if report := self._worker.take_report():
            report.round_s = self._clock() - started_s
            self._deliver(report)
            said = True
        if pause_s:
            return self._clock() + pause_s
        if self._worker.has_due:
            return 0.0
        if not self._worker.may_run_ahead:
            return None
        return self._clock() + _BEFORE_RUNNING_AHEAD_S if said else 0.0
