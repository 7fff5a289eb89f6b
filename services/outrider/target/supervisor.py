"""Starts the ranks of a tensor-parallel target, and restarts all of them when one dies or is silent. Knows no model.

Ranks are new processes, not forks of this one: what it has imported (torchao, for one) may have initialised CUDA, which
does not outlive a fork. No rank outlives its group or this process.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from prometheus_client import CollectorRegistry, Counter

from outrider.engine.parallel.group import Place, listen
from outrider.engine.parallel.links import Link
from outrider.engine.parallel.watchdog import READY
from outrider.telemetry.ops import InlineOpsServer, Ops

log = logging.getLogger(__name__)

RunRank = Callable[[Place], int]
"""Runs one rank to its end, in its own process, and returns its exit code."""

_SPAWN = multiprocessing.get_context("spawn")
# Until its first heartbeat a rank imports torch and transformers.
_IMPORTS_S = 120.0
_RESTARTS, _WINDOW_S = 5, 60.0
_POLL_S = 0.2
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(slots=True, eq=False)
class Rank:
    """One rank's process, as the supervisor knows it."""

    number: int
    pid: int
    beat_fd: int
    last_beat_s: float
    """When it last sent a heartbeat, in monotonic seconds."""
    ready: bool = False
    ended: bool = False
    code: int = 0
    """Exit code once it has ended; negative: the signal that ended it."""

    def listen(self, now_s: float) -> None:
        """Reads its heartbeats."""
        if beats := os.read(self.beat_fd, 4096):
            self.last_beat_s = now_s
            self.ready = self.ready or READY in beats

    def reap(self, flags: int) -> None:
        """Records its exit code, if it has ended."""
        if self.ended:
            return
        pid, status = os.waitpid(self.pid, flags)
        if pid:
            self.ended, self.code = True, os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)

    def __str__(self) -> str:
        how = f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"
        return f"rank {self.number} (process {self.pid}) {how}"


def supervisor_metrics(registry: CollectorRegistry) -> Counter:
    name, meaning = "outrider_tensor_parallel_restarts", "Times that all ranks of a target were started again."
    return Counter(name, meaning, registry=registry)


@dataclass(slots=True)
class Supervisor:
    """Runs groups of `size` ranks, one after another, until one ends normally or too many fail."""

    size: int
    step_timeout_s: float
    run_rank: RunRank
    ops: Ops
    """The configuration that the ops port shows."""
    ops_listen: str = ""
    """HOST:PORT of the ops port; empty for none."""
    _ranks: list[Rank] = field(default_factory=list)
    _server: InlineOpsServer | None = None
    _stopping: bool = False
    _signals: list[int] = field(default_factory=list)
    restarts: Counter = field(init=False)

    def run(self) -> int:
        """Returns the exit code: that of rank 0 when it ended by itself, 1 when restarts did not help."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        self._open_ops()
        restarted: deque[float] = deque(maxlen=_RESTARTS)
        while True:
            self._start()
            try:
                fault = self._watch()
            finally:
                self._end()
            lead = self._ranks[0]
            if not fault:
                return lead.code
            log.error("%s", fault)
            if self._stopping or (not lead.ready and not restarted):
                return lead.code if lead.code > 0 else 1
            now_s = time.monotonic()
            if len(restarted) == _RESTARTS and now_s - restarted[0] < _WINDOW_S:
                log.error("%d restarts within %g s: giving up", _RESTARTS, _WINDOW_S)
                return 1
            restarted.append(now_s)
            log.warning("all %d ranks are started again", self.size)
            self.restarts.inc()

    def _open_ops(self) -> None:
        self.ops.ready["ranks"] = lambda: "" if self._ranks and self._ranks[0].ready else "the ranks are starting"
        if self.ops_listen:
            self._server = InlineOpsServer(self.ops, self.ops_listen)
            log.info("ops port of the supervisor: http://%s", self._server.bound)

    def __post_init__(self) -> None:
        self.restarts = supervisor_metrics(self.ops.registry)

    @property
    def _ops_fds(self) -> list[int]:
        return [self._server.fileno()] if self._server is not None else []

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        # Only recorded here, and passed on by `_watch`: a signal between two groups must not be lost.
        self._signals.append(number)

    def _start(self) -> None:
        rendezvous = listen()
        pairs = [Link.pair() for _ in range(self.size - 1)]
        beats = [os.pipe() for _ in range(self.size)]
        self._ranks = []
        for number in range(self.size):
            links = tuple(pair[0] for pair in pairs) if number == 0 else (pairs[number - 1][1],)
            place = Place(number, self.size, links, rendezvous, beats[number][1], self.step_timeout_s)
            process = _SPAWN.Process(target=_run, args=(self.run_rank, place, os.getpid()))
            process.start()
            assert process.pid is not None
            self._ranks.append(Rank(number, process.pid, beats[number][0], time.monotonic() + _IMPORTS_S))
            log.info("rank %d of %d is process %d", number, self.size, process.pid)
        rendezvous.close()
        for _, write_end in beats:
            os.close(write_end)
        for link in (link for pair in pairs for link in pair):
            link.close()

    def _watch(self) -> str:
        """Waits until rank 0 has ended normally, which returns "", or there is a reason to end all ranks, which is
        returned."""
        while True:
            self._pass_on_signals()
            open_fds = {rank.beat_fd: rank for rank in self._ranks if not rank.ended}
            for fd in select.select([*open_fds, *self._ops_fds], [], [], _POLL_S)[0]:
                if fd in open_fds:
                    open_fds[fd].listen(time.monotonic())
                elif self._server is not None:
                    self._server.answer()
            now_s = time.monotonic()
            for rank in self._ranks:
                rank.reap(os.WNOHANG)
                if rank.ended and rank.code != 0:
                    return str(rank)
                if not rank.ended and now_s - rank.last_beat_s > self.step_timeout_s:
                    return f"rank {rank.number} (process {rank.pid}) has said nothing for {self.step_timeout_s:g} s"
            if self._ranks[0].ended:
                return ""

    def _pass_on_signals(self) -> None:
        while self._signals:
            self._stopping = True
            lead, number = self._ranks[0], self._signals.pop(0)
            if not lead.ended:
                os.kill(lead.pid, number)

    def _end(self) -> None:
        """Ends every process of the group."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.reap(0)
            os.close(rank.beat_fd)


def _run(run_rank: RunRank, place: Place, parent: int) -> None:
    """A rank's process, from start to end."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    prctl(_PR_SET_NAME, f"outrider-tp-{place.rank}".encode())
    # Ctrl-C in a terminal is for the supervisor, which passes it on to rank 0.
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if place.rank == 0 else signal.SIG_IGN)
    code = 1
    try:
        code = run_rank(place)
    except BaseException:
        traceback.print_exc()
    finally:
        # Skips exit handlers, which could wait for threads.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
