"""The step loop on its own thread: apply what came in, step, hand out what came of it; sleep when there is nothing.

The thread owns the engine. Everyone else talks to it through `post`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from outrider.rpc.inbox import Inbox
from outrider.target.events import Event
from outrider.target.report import Load, Report
from outrider.target.worker import TargetWorker

log = logging.getLogger(__name__)

Deliver = Callable[[Report], None]
"""Called on the step thread after each turn. Must not block."""

_PAUSE_AFTER_FAULT_S = 0.05


class Steps(Protocol):
    """What runs a worker's steps, as the service sees it."""

    @property
    def load(self) -> Load:
        """As of the last step. May be read from any thread."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """Ends after the step under way."""
        ...

    def post(self, events: Iterable[Event]) -> None:
        """Queues events for the next step, all of them for the same one. Never blocks."""
        ...


MakeSteps = Callable[[TargetWorker, Deliver], Steps]


class StepLoop:
    """Runs a worker until stopped."""

    def __init__(self, worker: TargetWorker, deliver: Deliver, clock: Callable[[], float] = time.monotonic) -> None:
        self.load: Load = worker.load
        self._worker = worker
        self._deliver = deliver
        self._clock = clock
        self._inbox: Inbox[Event] = Inbox(clock)
        worker.take_late = self._inbox.take
        self._thread = threading.Thread(target=self._run, name="outrider-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in."""
        self._inbox.stop()
        self._thread.join()

    def post(self, events: Iterable[Event]) -> None:
        """Queues events for the next step, all of them for the same one. Wakes the thread. Never blocks."""
        self._inbox.post(events)

    def _run(self) -> None:
        wake_at_s: float | None = None
        while True:
            events = self._inbox.wait(wake_at_s)
            if events is None:
                return
            wake_at_s = self.turn(events)

    def turn(self, events: Iterable[Event]) -> float | None:
        """Applies events, runs one step, hands out the report. Returns when it is due again, as TargetWorker.step does.

        For whoever runs the loop: the thread, or a simulation of it.
        """
        for event in events:
            self._guarded(partial(self._worker.apply, event))
        wake_at_s = self._guarded(self._worker.step)
        self.load = self._worker.load
        self._deliver(self._worker.take_report())
        return wake_at_s

    def _guarded(self, action: Callable[[], float | None]) -> float | None:
        try:
            return action()
        except Exception as error:
            # A fault outside any one sequence. All of them are told; the worker itself goes on.
            log.error("the step loop failed", exc_info=error)
            self._worker.fail_all(error)
            return self._clock() + _PAUSE_AFTER_FAULT_S
