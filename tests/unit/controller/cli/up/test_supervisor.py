"""What dies is started again by itself, whatever else is being started."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from outrider_controller.cli.up.process import ManagedProcess, ProcessFailed, ProcessSpec
from outrider_controller.cli.up.supervisor import RestartBackoff, Supervisor

SLEEPS = (sys.executable, "-c", "import time; time.sleep(60)")
ENDS = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
LIMIT_S = 20.0


class Processes:
    """Small real ones, started again as a stack does it."""

    def __init__(self, directory: Path) -> None:
        self.running: dict[str, ManagedProcess] = {}
        self.starts: dict[str, int] = {}
        self.lines: list[str] = []
        self._directory = directory

    async def start(
        self, name: str, argv: tuple[str, ...] = SLEEPS, answers: Callable[[], bool] | None = None
    ) -> ManagedProcess:
        process = ManagedProcess(ProcessSpec(name, argv, "", answers=answers), self._directory / f"{name}.log")
        self.running[name] = process
        self.starts[name] = self.starts.get(name, 0) + 1
        await process.start()
        return process

    async def relaunch(self, name: str) -> ManagedProcess:
        old = self.running[name]
        await old.stop(1.0)
        return await self.start(name, old.spec.argv, old.spec.answers)

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        task = asyncio.create_task(Supervisor(self.running, self.relaunch, self.lines.append, LIMIT_S).run())
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.gather(*(process.stop(1.0) for process in self.running.values()))

    async def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S / 2
        while not condition():
            assert time.monotonic() < end_s, self.lines
            await asyncio.sleep(0.02)

    async def until_printed(self, line: str) -> None:
        await self.until(lambda: line in "\n".join(self.lines).splitlines())


async def test_a_process_that_waits_for_another_does_not_keep_it_from_being_started(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    controller = await processes.start("controller")
    gateway = await processes.start("gateway", answers=lambda: processes.running["controller"].running)
    async with processes.supervised():
        gateway.kill()
        controller.kill()
        await processes.until_printed("controller is ready again")
        await processes.until_printed("gateway is ready again")
    assert processes.starts == {"controller": 2, "gateway": 2}


async def test_one_that_dies_at_every_start_is_told_with_its_reason_and_waits_longer_each_time(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    await processes.start("target-0", ENDS)
    other = await processes.start("draft-0")
    async with processes.supervised():
        await processes.until_printed("target-0 is started again in 1 s")
        other.kill()
        await processes.until_printed("draft-0 is ready again")
    printed = "\n".join(processes.lines)
    assert printed.index("target-0 is started again\n") < printed.index("target-0 is started again in 0.5 s")
    assert "exit code 3" in printed and "no such model" in printed
    assert "draft-0 was ended by SIGKILL" in printed


async def test_one_that_cannot_be_executed_any_more_is_tried_again(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    process = await processes.start("target-0")
    relaunch, refusals = processes.relaunch, [ProcessFailed("target-0 cannot be started: no memory")]

    async def refusing(name: str) -> ManagedProcess:
        if refusals:
            raise refusals.pop()
        return await relaunch(name)

    processes.relaunch = refusing  # type: ignore[method-assign]
    async with processes.supervised():
        process.kill()
        await processes.until_printed("target-0 is ready again")
    assert any("no memory" in line for line in processes.lines)


def test_the_wait_doubles_to_its_longest_and_is_none_again_after_steady_service() -> None:
    backoff = RestartBackoff(first_s=0.5, longest_s=4, steady_s=10)
    assert [backoff.died(served_s) for served_s in (3, 3, 0, 0, 0, 0)] == [0, 0.5, 1, 2, 4, 4]
    assert [backoff.died(served_s) for served_s in (10, 1)] == [0, 0.5]
