"""The step loop on its own thread: apply what came in, step, hand out what came of it; sleep when there is nothing.

The thread owns the machine: the worker's state and its model. Everyone else talks to it through `post`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, Protocol, TypeVar

from outrider.worker.events import WorkerEvent
from outrider.worker.inbox import Inbox
from outrider.worker.report import Load

log = logging.getLogger(__name__)

E = TypeVar("E")
"""What can happen to one kind of worker besides `WorkerEvent`."""
R = TypeVar("R")
E_contra = TypeVar("E_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

Deliver = Callable[[R], None]
"""Called on the step thread after each turn. Must not block."""

_PAUSE_AFTER_FAULT_S = 0.05


class StepMachine(Protocol[E_contra, R_co]):
    """What a loop runs: pure of threads and network."""

    @property
    def load(self) -> Load: ...

    def apply(self, event: E_contra | WorkerEvent) -> None:
        """Follows one event; a fault in it ends its sequence and is reported."""
        ...

    def step(self) -> float | None:
        """Returns when to call again if nothing happens before: 0 for at once, None for never, else seconds on the
        loop's clock."""
        ...

    def take_report(self) -> R_co:
        """What happened since the last call. May be empty."""
        ...

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        ...


class Steps(Protocol[E_contra]):
    """What runs a machine, as the service sees it."""

    @property
    def load(self) -> Load:
        """As of the last step. May be read from any thread."""
        ...

    @property
    def busy_since_s(self) -> float | None:
        """When the turn under way began, in monotonic seconds; None while there is nothing to do. From any thread."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """Ends after the step under way."""
        ...

    def post(self, events: Iterable[E_contra | WorkerEvent]) -> None:
        """Queues events for the next step, all of them for the same one. Never blocks."""
        ...


class StepLoop(Generic[E, R]):
    """Runs a machine until stopped."""

    def __init__(
        self,
        machine: StepMachine[E, R],
        deliver: Deliver[R],
        clock: Callable[[], float] = time.monotonic,
        inbox: Inbox[E | WorkerEvent] | None = None,
    ) -> None:
        """`inbox`: where events come in; for a machine that looks into it during a step."""
        self.load: Load = machine.load
        self.busy_since_s: float | None = None
        self._machine = machine
        self._deliver = deliver
        self._clock = clock
        self._inbox: Inbox[E | WorkerEvent] = inbox or Inbox(clock)
        self._thread = threading.Thread(target=self._run, name="outrider-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in."""
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
        """Applies events, runs one step, hands out the report. Returns when it is due again, as `StepMachine.step`.

        For whoever runs the loop: the thread, or a simulation of it.
        """
        self.busy_since_s = self._clock()
        for event in events:
            # Each by itself: a fault in one must not lose the next, which may say that a stream has ended.
            self._guarded(partial(self._machine.apply, event))
        wake_at_s = self._guarded(self._machine.step)
        self.load = self._machine.load
        self._deliver(self._machine.take_report())
        self.busy_since_s = None
        return wake_at_s

    def _guarded(self, action: Callable[[], float | None]) -> float | None:
        try:
            return action()
        except Exception as error:
            # A fault outside any one sequence. All of them are told; the worker itself goes on.
            log.error("the step loop failed", exc_info=error)
            self._machine.fail_all(error)
            return self._clock() + _PAUSE_AFTER_FAULT_S
