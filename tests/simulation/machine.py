"""A worker's step loop as a task in virtual time: the shipped turns, with pauses for the time they would take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

_MIN_WAIT_S = 1e-6


class _Loop(Protocol):
    """StepLoop of a target or a draft, whose thread is never started."""

    load: Any
    busy_since_s: float | None
    problem: str

    def turn(self, events: Iterable[Any]) -> float | None: ...


class StepFailed(RuntimeError):
    """A planted fault of a step."""


class Machine:
    """The processor of one worker. Its computing takes time on its own clock, which runs ahead within a turn."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self.stalled_until_s = 0.0
        self.failures_due = 0
        self._step_s = step_s
        self._token_s = token_s
        self._spent_s = 0.0
        self._loop = asyncio.get_running_loop()

    def clock(self) -> float:
        return self._loop.time() + self._spent_s

    def compute(self, num_tokens: int) -> None:
        """One forward. Raises StepFailed when a failure is due."""
        self._spent_s += self._step_s + self._token_s * num_tokens
        if self.failures_due:
            self.failures_due -= 1
            raise StepFailed("planted")

    async def finish(self) -> None:
        """Sleeps until the loop's time has caught up with this clock."""
        spent_s, self._spent_s = self._spent_s, 0.0
        rest_s = max(spent_s, self.stalled_until_s - self._loop.time())
        if rest_s > 0:
            await asyncio.sleep(rest_s)


class VirtualSteps:
    """What a service knows of a StepLoop: a task in place of its thread."""

    def __init__(
        self, loop: Callable[[Callable[[Any], None]], _Loop], deliver: Callable[[Any], None], machine: Machine
    ) -> None:
        self._reports: list[Any] = []
        self._loop = loop(self._reports.append)
        self._deliver = deliver
        self._machine = machine
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
        """The process runs `run` itself."""

    def stop(self) -> None:
        """The process cancels `run`."""

    def post(self, events: Iterable[Any]) -> None:
        self._inbox.extend(events)
        self._filled.set()

    async def run(self) -> None:
        wake_at_s: float | None = None
        while True:
            await self._wait(wake_at_s)
            await self._machine.finish()
            events, self._inbox = self._inbox, []
            wake_at_s = self._loop.turn(events)
            await self._machine.finish()
            for report in self._reports:
                self._deliver(report)
            self._reports.clear()

    async def _wait(self, wake_at_s: float | None) -> None:
        if self._inbox:
            return
        self._filled.clear()
        timeout_s = None if wake_at_s is None else wake_at_s - self._machine.clock()
        if timeout_s is not None:
            if timeout_s <= 0:
                return
            # A shorter wait would not move the clock, and the loop would never end.
            timeout_s = max(timeout_s, _MIN_WAIT_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._filled.wait(), timeout_s)
