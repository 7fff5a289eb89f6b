"""Work whose time and memory a stranger decides, in a process of its own, which ends when it takes too much of either.

The kernel keeps the bounds. Time is processor time: a machine with other work ends nothing earlier. The program of such
a process calls `serve`.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from outrider.errors import Overloaded
from outrider.runtime.spawn import bound_to_us

_NO_MEMORY = 77
"""Exit status of a process that reached its bound of memory."""
_MAX_WAIT_S = 60.0
"""For an answer, on a machine that is busy: nothing in such a process waits, so that its processor time ends before."""
_SHORT_S, _LOOK_S = 0.25, 0.05
"""Processor time after which work yields, and the time between two looks at it."""
_OF_OTHERS = {0, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""How a process ends for reasons outside it. 0: it has not answered in time, and its connection was closed."""
Answer = Callable[[bytes], bytes]


class OutOfBounds(Exception):
    """The work took too much, and its process has ended. The text says of what."""

    def __init__(self, message: str, *, of_memory: bool = False) -> None:
        super().__init__(message)
        self.of_memory = of_memory


class BoundedProcess:
    """Answers questions, one after the other; starts with the first, and again after one that it did not survive.

    For one thread, which has to outlive it: the process ends with the thread that starts it.
    """

    def __init__(
        self,
        module: str,
        setting: bytes = b"",
        *,
        cpu_s: float,
        extra_bytes: int,
        yields: bool = False,
    ) -> None:
        """`module`: of the program; `setting`: what all its questions need. `cpu_s`: processor time of an answer.
        `extra_bytes`: memory beyond that of the process before its first question. `yields`: whether an
        answer that takes long has only what all others leave of its cores, which are those of the thread that starts
        it."""
        self._module, self._setting = module, setting
        self._cpu_s, self._extra_bytes = cpu_s, extra_bytes
        self._yields = yields
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._started = self._retired = False

    def ask(self, question: bytes) -> bytes:
        """Raises OutOfBounds, and Overloaded where something else has ended the process, or a busy machine let it wait
        too long."""
        used = self._child is not None
        try:
            return self._asked(question)
        except OutOfBounds as error:
            if not (used and error.of_memory):
                raise
        # What it kept of earlier questions is no part of the answer.
        return self._asked(question)

    def _asked(self, question: bytes) -> bytes:
        if self._retired:
            self.close()
        if self._child is None or self._child.poll() is not None:
            self._start()
        assert self._child is not None
        assert self._connection is not None
        ready = False
        try:
            self._connection.send_bytes(question)
            # The first is to say that it has started.
            while self._answers(self._child, self._connection):
                answer, ready = self._connection.recv_bytes(), True
                if self._started:
                    return answer
                self._started = True
        except (EOFError, ConnectionError):
            pass
        raise self._ended(ready or self._started)

    def _answers(self, child: subprocess.Popen[bytes], connection: Connection) -> bool:
        """Waits until it does, or ends, or it has been too long."""
        until_s, before_s, yielding = time.monotonic() + _MAX_WAIT_S, _processor_s(child), False
        while not (found := connection.poll(_LOOK_S)) and time.monotonic() < until_s:
            if self._yields and not yielding and _processor_s(child) - before_s > _SHORT_S:
                yielding = _schedule(child, os.SCHED_IDLE)
        if yielding and not _schedule(child, os.SCHED_OTHER):
            # It needs a right that we have not. The next question has a new process.
            self._retired = True
        return found

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._ended(started=True)

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            bounds = [str(theirs.fileno()), str(self._cpu_s), str(self._extra_bytes)]
            command = bound_to_us([sys.executable, "-P", "-m", self._module, *bounds])
            self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._connection, self._started, self._retired = ours, False, False
        # A process that has ended already is found when it is asked.
        with suppress(ConnectionError):
            ours.send_bytes(self._setting)

    def _ended(self, started: bool) -> OutOfBounds | Overloaded:
        """Ends the process, if it has not ended. Says why it has."""
        child, connection = self._child, self._connection
        assert child is not None and connection is not None
        self._child = self._connection = None
        connection.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        child.kill()
        status = child.wait()
        if status == -signal.SIGPROF:
            return OutOfBounds(f"it takes more than {self._cpu_s:g} s of processor time")
        if status == _NO_MEMORY:
            return OutOfBounds(f"it takes more than {self._extra_bytes >> 20} MiB of memory", of_memory=True)
        why = f"its process ended with status {status}"
        if started and -status not in _OF_OTHERS:
            # Rust aborts where it gets no memory.
            return OutOfBounds(why, of_memory=status == -signal.SIGABRT)
        return Overloaded(f"the machine is too busy for it: {why}", retry_after_s=1.0)


def _processor_s(child: subprocess.Popen[bytes]) -> float:
    """0 when it has ended, and where only Linux could tell."""
    with suppress(OSError):
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _schedule(child: subprocess.Popen[bytes], policy: int) -> bool:
    """All its threads. Whether that is permitted."""
    with suppress(ProcessLookupError, FileNotFoundError):
        try:
            for thread in Path(f"/proc/{child.pid}/task").iterdir():
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))
        except PermissionError:
            return False
    return True


def serve(make: Callable[[bytes], Answer]) -> None:
    """The life of a process. `make` gets the setting, without bounds, and returns what answers within them."""
    file, cpu_s, extra_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    # What is raised otherwise goes to the log of the process that asked.
    with Connection(file) as connection, suppress(EOFError, ConnectionError):
        answer = make(connection.recv_bytes())
        _bound_memory(extra_bytes)
        connection.send_bytes(b"")
        while True:
            question = connection.recv_bytes()
            # Its signal ends a process that does not handle it.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                found = answer(question)
            except MemoryError:
                os._exit(_NO_MEMORY)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(found)
            del question, found


def _bound_memory(extra_bytes: int) -> None:
    """Beyond what this process has now. Linux only."""
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now_bytes = int(status["VmData"].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (now_bytes + extra_bytes, resource.RLIM_INFINITY))
