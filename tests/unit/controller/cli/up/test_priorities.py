"""Processes that go first, where the system lets them and where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from outrider_controller.cli.up.process import ManagedProcess, ProcessSpec
from outrider_controller.cli.up.stack import go_first, put_first

WITH_A_THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True)"


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", WITH_A_THREAD], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process.pid
        process.kill()


def policies(pid: int) -> list[tuple[int, int]]:
    threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    return [(os.sched_getscheduler(thread), os.sched_getparam(thread).sched_priority) for thread in threads]


def test_every_thread_of_a_process_goes_first_where_the_system_permits(child: int) -> None:
    if not go_first(child, 3):
        pytest.skip("no right to a real-time priority")
    assert policies(child) == [(os.SCHED_FIFO, 3)] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "only the process that was meant"


def test_without_the_right_all_goes_on_as_before(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not go_first(child, 3)
    assert policies(child) == [(os.SCHED_OTHER, 0)] * 2


def test_a_process_that_is_gone_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert not go_first(process.pid, 1)


@asynccontextmanager
async def running(name: str, directory: Path) -> AsyncIterator[ManagedProcess]:
    spec = ProcessSpec(name, (sys.executable, "-c", WITH_A_THREAD), "")
    process = ManagedProcess(spec, directory / f"{name}.log")
    await process.start()
    try:
        yield process
    finally:
        await process.stop(1)


async def test_drafts_that_serve_go_first_and_nobody_else(tmp_path: Path, child: int) -> None:
    if not go_first(child, 1):
        pytest.skip("no right to a real-time priority")
    async with (
        running("draft-0", tmp_path) as serving,
        running("draft-1", tmp_path) as loading,
        running("target-0", tmp_path) as target,
    ):
        await serving.ready(10)
        await target.ready(10)
        await put_first({one.spec.name: one for one in (serving, loading, target)})
        assert set(policies(serving.pid)) == {(os.SCHED_FIFO, 2)}
        assert set(policies(loading.pid) + policies(target.pid)) == {(os.SCHED_OTHER, 0)}
