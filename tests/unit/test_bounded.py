"""Processes in bounds: what takes too much is ended and said, and the next question is answered."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
from outrider.errors import Overloaded
from outrider.runtime.bounded import BoundedProcess, OutOfBounds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its bounds are Linux's")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[BoundedProcess]:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    process = BoundedProcess("tests.unit.bounded_program", b"to ", cpu_s=0.2, extra_bytes=64 << 20)
    yield process
    process.close()


@pytest.mark.parametrize(
    ("question", "said"),
    [(b"loop", "0.2 s of processor time"), (b"fill", "64 MiB of memory"), (b"crash", f"status -{signal.SIGABRT:d}")],
)
def test_what_is_out_of_bounds_is_said_and_the_next_question_is_answered(
    process: BoundedProcess, question: bytes, said: str
) -> None:
    assert process.ask(b"you") == b"to you"
    with pytest.raises(OutOfBounds, match=said):
        process.ask(question)
    assert process.ask(b"you") == b"to you"


def test_one_process_answers_many_questions_and_is_replaced_if_it_has_gone(process: BoundedProcess) -> None:
    pid = process.ask(b"pid")
    assert process.ask(b"pid") == pid
    killed = psutil.Process(int(pid))
    killed.kill()
    killed.wait(60)
    assert process.ask(b"pid") != pid


def test_one_that_cannot_start_or_that_others_end_says_nothing_of_the_question(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BoundedProcess("tests.unit.bounded_program", b"fault", cpu_s=9, extra_bytes=64 << 20)
    with pytest.raises(Overloaded):
        broken.ask(b"you")
    pid = int(process.ask(b"pid"))
    monkeypatch.setattr(process._connection, "poll", lambda timeout_s: os.kill(pid, signal.SIGTERM) or True)
    with pytest.raises(Overloaded):
        process.ask(b"loop")


def test_what_takes_long_has_what_others_leave_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    process = BoundedProcess("tests.unit.bounded_program", cpu_s=60, extra_bytes=64 << 20, yields=True)
    try:
        assert int(process.ask(b"policy")) == os.SCHED_OTHER
        assert int(process.ask(b"long")) == os.SCHED_IDLE
        assert int(process.ask(b"policy")) == os.SCHED_OTHER
    finally:
        process.close()


def test_it_ends_with_the_thread_that_uses_it(process: BoundedProcess) -> None:
    pids = []
    thread = threading.Thread(target=lambda: pids.append(int(process.ask(b"pid"))))
    thread.start()
    thread.join()
    assert psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)[1] == []
