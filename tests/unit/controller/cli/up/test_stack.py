"""A stack that does not come up says which process is the cause."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from outrider_controller.cli.up.process import ManagedProcess, ProcessFailed, ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig


async def test_one_that_was_ready_and_ends_is_named_and_not_those_that_wait_for_it(tmp_path: Path) -> None:
    dies = "import time; time.sleep(0.5); print('outrider_controller: the actors did not start'); raise SystemExit(1)"
    controller = ProcessSpec("controller", (sys.executable, "-c", dies), "")
    gateway = ProcessSpec("gateway", (sys.executable, "-c", "import time; time.sleep(60)"), "", answers=lambda: False)
    lines: list[str] = []
    stack = Stack(StackConfig(start_timeout_s=20.0), lines.append)
    stack.processes = {spec.name: ManagedProcess(spec, tmp_path / f"{spec.name}.log") for spec in (controller, gateway)}
    try:
        for process in stack.processes.values():
            await process.start()
        with pytest.raises(ProcessFailed, match=r"controller ended with exit code 1: .*the actors did not start"):
            await stack.all_ready(time.monotonic())
    finally:
        await asyncio.gather(*(process.stop(1.0) for process in stack.processes.values()))
    assert [line.split(" (")[0] for line in lines] == ["controller is ready"]


async def test_one_that_takes_too_long_is_told_with_the_option_that_gives_it_longer(tmp_path: Path) -> None:
    slow = ProcessSpec("target-0", (sys.executable, "-c", "import time; time.sleep(60)"), "", answers=lambda: False)
    process = ManagedProcess(slow, tmp_path / "target-0.log")
    await process.start()
    try:
        with pytest.raises(ProcessFailed, match=r"target-0 is not ready after 0.1 s \(--start-timeout\); "):
            await process.ready(0.1)
    finally:
        await process.stop(1.0)
