"""Starts again what dies: each process by itself and at once, later and later only when it dies again and again.

No process waits for another to be ready: a gateway is so only once a router serves, which may be starting, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from outrider_controller.cli.up.process import ManagedProcess, ProcessFailed


@dataclass(slots=True)
class RestartBackoff:
    """How long to wait before the next start of one process. Pure."""

    first_s: float = 0.5
    longest_s: float = 15.0
    steady_s: float = 10.0
    """After this time in service, a death is a first one again."""
    next_s: float = 0.0

    def died(self, served_s: float) -> float:
        """`served_s`: since it was last ready; 0 when it was not."""
        delay_s = 0.0 if served_s >= self.steady_s else self.next_s
        self.next_s = min(self.longest_s, max(self.first_s, 2 * delay_s))
        return delay_s


@dataclass(frozen=True, slots=True)
class Supervisor:
    """Of processes that run. No death ends it, for the others still serve."""

    processes: Mapping[str, ManagedProcess]
    relaunch: Callable[[str], Awaitable[ManagedProcess]]
    """Starts the process of this name again; raises ProcessFailed when it cannot be executed."""
    tell: Callable[[str], None]
    ready_timeout_s: float
    """After it, a line says that a process is not ready yet."""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self.processes:
                group.create_task(self._keep(name))

    async def _keep(self, name: str) -> NoReturn:
        process, backoff, ready_s = self.processes[name], RestartBackoff(), time.monotonic()
        while True:
            await process.exited()
            died_s = time.monotonic()
            failure, delay_s = process.failure(), backoff.died(died_s - (ready_s or died_s))
            process = await self._started_again(name, failure, delay_s, backoff)
            ready_s = await self._ready(process)

    async def _started_again(
        self, name: str, failure: ProcessFailed, delay_s: float, backoff: RestartBackoff
    ) -> ManagedProcess:
        while True:
            self.tell(f"{failure}\n{name} is started again" + (f" in {delay_s:g} s" if delay_s else ""))
            await asyncio.sleep(delay_s)
            try:
                return await self.relaunch(name)
            except ProcessFailed as error:
                failure, delay_s = error, backoff.died(0)

    async def _ready(self, process: ManagedProcess) -> float:
        """When it became ready, by the monotonic clock; 0 when it ended before."""
        while process.running:
            try:
                await process.ready(self.ready_timeout_s)
            except ProcessFailed as error:
                # What it waits for may be away for longer: it is not ended for that.
                if process.running:
                    self.tell(f"{error}\nit is still waited for")
            else:
                self.tell(f"{process.spec.name} is ready again")
                return time.monotonic()
        return 0.0
