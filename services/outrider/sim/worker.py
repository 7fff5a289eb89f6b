"""A worker in virtual time: the shipped step loop as a task, with pauses for the time that its turns would take."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from outrider.worker.loop import StepLoop, StepMachine
from outrider.worker.watchdog import end_broken

_MIN_WAIT_S = 1e-6


class Processor:
    """Of one worker. What it computes takes time on its own clock, which runs ahead of `base`."""

    def __init__(self, base: Callable[[], float], between_steps_s: float = 0.0) -> None:
        """`between_steps_s`: passes between two steps, which are reported before it."""
        self.stalled_until_s = 0.0
        self.between_steps_s = between_steps_s
        self._base = base
        self._spent_s = 0.0

    def clock(self) -> float:
        return self._base() + self._spent_s

    def spend(self, seconds: float) -> None:
        self._spent_s += seconds

    async def finish(self) -> bool:
        """Sleeps until the base's time has caught up with this clock. Returns whether anything was computed."""
        spent_s, self._spent_s = self._spent_s, 0.0
        rest_s = max(spent_s, self.stalled_until_s - self._base())
        if rest_s > 0:
            await asyncio.sleep(rest_s)
        return spent_s > 0


class VirtualSteps:
    """What a service knows of a StepLoop: a task in place of its thread."""

    def __init__(
        self,
        machine: StepMachine[Any, Any],
        deliver: Callable[[Any], None],
        processor: Processor,
        end: Callable[[str, Exception], None] = end_broken,
    ) -> None:
        """As StepLoop; a report is delivered when its step has ended."""
        self._reports: list[Any] = []
        self._loop = StepLoop(machine, self._reports.append, processor.clock, end)
        self._deliver = deliver
        self._processor = processor
        self._inbox: list[Any] = []
        self._filled = asyncio.Event()

    @property
    def load(self) -> Any:
        return self._loop.load

    @property
    def busy_since_s(self) -> float | None:
        return self._loop.busy_since_s

    @property
    def problem(self) -> str:
        return self._loop.problem

    def start(self) -> None:
        """Whoever made it runs `run`."""

    def stop(self) -> None:
        """Whoever made it cancels `run`."""

    def post(self, events: Iterable[Any]) -> None:
        self._inbox.extend(events)
        self._filled.set()

    async def run(self) -> None:
        wake_at_s: float | None = None
        while True:
            await self._wait(wake_at_s)
            await self._processor.finish()
            events, self._inbox = self._inbox, []
            wake_at_s = self._loop.turn(events)
            computed = await self._processor.finish()
            for report in self._reports:
                self._deliver(report)
            self._reports.clear()
            if computed and self._processor.between_steps_s:
                await asyncio.sleep(self._processor.between_steps_s)

    async def _wait(self, wake_at_s: float | None) -> None:
        if self._inbox:
            return
        self._filled.clear()
        timeout_s = None if wake_at_s is None else wake_at_s - self._processor.clock()
        if timeout_s is not None:
            if timeout_s <= 0:
                return
            # A shorter wait would not move the clock, and the loop would never end.
            timeout_s = max(timeout_s, _MIN_WAIT_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._filled.wait(), timeout_s)


class Wire:
    """From one worker to another: each message arrives after its own delay, and none before the one sent before it."""

    def __init__(self, receive: Callable[[Any], None]) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[Any] = deque()
        self._last_s = 0.0

    def send(self, message: Any, delay_s: float) -> None:
        self._last_s = max(self._last_s, self._loop.time() + delay_s)
        self._under_way.append(message)
        # Timers of the same moment fire in any order: each delivers the oldest message.
        self._loop.call_at(self._last_s, lambda: self._receive(self._under_way.popleft()))
