"""The step loop on its own thread: apply events, run a step, deliver the report; sleep when there is nothing to do.

The thread owns the machine: the worker's state and its model. Other threads reach it only through `post`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from outrider.engine import DeviceLost
from outrider.sequence.key import SequenceKey
from outrider.worker.events import Load, WorkerEvent
from outrider.worker.faults import WholeStepFailed
from outrider.worker.watchdog import end_broken

log = logging.getLogger(__name__)

E = TypeVar("E")
"""Events of one kind of worker besides `WorkerEvent`."""
R = TypeVar("R")
E_contra = TypeVar("E_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

Deliver = Callable[[R], None]
"""Called on the step thread after each turn. Must not block."""

_PAUSE_AFTER_FAULT_S = 0.05
_MAX_FAILED_STEPS = 3


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


class StepMachine(Protocol[E_contra, R_co]):
    """What a loop runs. It has no threads and no network."""

    @property
    def load(self) -> Load: ...

    def apply(self, event: E_contra | WorkerEvent) -> None:
        """Applies one event; a fault in it ends its sequence and is reported."""
        ...

    def step(self) -> float | None:
        """Returns when to call again if no event comes before: 0 for at once, None for never, else seconds on the
        loop's clock. Raises DeviceLost and WholeStepFailed."""
        ...

    def take_report(self) -> R_co:
        """What happened since the last call. May be empty."""
        ...

    def fail(self, key: SequenceKey, error: Exception) -> None:
        """Ends this sequence with `error`, whether it is open or not."""
        ...

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        ...


class StepLoop(Generic[E, R]):
    """Runs a machine until stopped."""

    def __init__(
        self,
        machine: StepMachine[E, R],
        deliver: Deliver[R],
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[str, Exception], None] = end_broken,
    ) -> None:
        """`end`: ends the process with a reason, when the device is lost or three whole steps in a row have failed."""
        self.load: Load = machine.load
        """As of the last step. This and the next two may be read from any thread."""
        self.busy_since_s: float | None = None
        """When the current turn began, in seconds of the clock; None between turns."""
        self.problem = ""
        """Why the worker has to be restarted; empty while it need not."""
        self._num_failed_steps = 0
        self._end = end
        self._machine = machine
        self._deliver = deliver
        self._clock = clock
        self._inbox: Inbox[E | WorkerEvent] = Inbox(clock)
        self._thread = threading.Thread(target=self._run, name="outrider-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step."""
        self._inbox.stop()
        self._thread.join()

    def post(self, events: Iterable[E | WorkerEvent]) -> None:
        """Queues events for the next step, all of them for the same one. Wakes the thread. Never blocks."""
        self._inbox.post(events)

    def _run(self) -> None:
        wake_at_s: float | None = None
        while (events := self._inbox.wait(wake_at_s)) is not None:
            wake_at_s = self.turn(events)

    def turn(self, events: Iterable[E | WorkerEvent]) -> float | None:
        """Applies events, runs one step, delivers the report. Returns when it is due again, as `StepMachine.step`.

        Called by the thread, or by a simulation of it.
        """
        self.busy_since_s = self._clock()
        for event in events:
            # Each by itself: a fault in one must not lose the next, which may be the end of a stream.
            try:
                self._apply(event)
            except Exception as error:
                self._failed(error)
        try:
            wake_at_s = self._step()
        except Exception as error:
            wake_at_s = self._failed(error)
        self.load = self._machine.load
        self._deliver(self._machine.take_report())
        self.busy_since_s = None
        return wake_at_s

    def _apply(self, event: E | WorkerEvent) -> None:
        """What one message breaks is its own sequence, never another's."""
        key = getattr(event, "key", None)
        try:
            self._machine.apply(event)
        except DeviceLost:
            raise
        except Exception as error:
            if key is None:
                raise
            log.error("a message about a sequence failed", exc_info=error)
            self._machine.fail(key, error)

    def _step(self) -> float | None:
        try:
            wake_at_s = self._machine.step()
        except DeviceLost as error:
            return self._broken("the device is lost", error)
        except Exception as error:
            self._num_failed_steps += 1
            if self._num_failed_steps == _MAX_FAILED_STEPS:
                return self._broken(f"{_MAX_FAILED_STEPS} whole steps in a row have failed", error)
            if isinstance(error, WholeStepFailed):
                log.error("a whole step failed", exc_info=error)
                return self._clock() + _PAUSE_AFTER_FAULT_S
            raise
        if self._machine.load.num_running:
            # An idle worker's step says nothing.
            self._num_failed_steps = 0
        return wake_at_s

    def _broken(self, problem: str, error: Exception) -> float | None:
        """Its sequences are not told: their streams break, and that moves them to other workers."""
        self.problem = f"{problem} ({type(error).__name__})"
        self._end(problem, error)
        return None

    def _failed(self, error: Exception) -> float:
        """The fault is not of one sequence: it ends all of them, and the worker continues."""
        log.error("the step loop failed", exc_info=error)
        self._machine.fail_all(error)
        return self._clock() + _PAUSE_AFTER_FAULT_S
