"""One supervised child process: its log, its health, its end. Knows nothing of what it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from outrider.runtime.spawn import bound_to_us

_HEALTH_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 2.0
_TAIL_LINES = 20


class ProcessFailed(Exception):
    """A process that ended, or did not become ready. The message says which, and how its log ends."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    name: str
    argv: tuple[str, ...]
    address: str
    """HOST:PORT whose grpc.health.v1 says when it is ready, unless `answers` does; empty: ready once it runs."""
    endpoints: Mapping[str, str] = field(default_factory=dict)
    """Other addresses it listens on, by what they are for."""
    cores: tuple[int, ...] = ()
    """CPU cores it and its children may use; empty means all."""
    env: Mapping[str, str] = field(default_factory=dict)
    answers: Callable[[], bool] | None = None
    """Whether it is ready, for what does not speak gRPC. Called in a thread; waits for a moment at most."""
    sooner: int = 0
    """Where memory is short the kernel ends it before others, the sooner the higher (to 1000)."""


class ManagedProcess:
    """A child in a session of its own: Ctrl-C in the terminal reaches it only through us, and so do its children."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.stopping = False
        self.serving = False
        """Whether it was ready since its last start."""
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    async def start(self) -> None:
        """Raises ProcessFailed when it cannot even be executed."""
        self.stopping = self.serving = False
        with open_log(self.log_path) as log:
            self._log_start = log.tell()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *bound_to_us(self.spec.argv, self.spec.cores, self.spec.sooner),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.env},
                )
            except OSError as error:
                raise ProcessFailed(f"{self.spec.name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Of the last start; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """Negative: the signal that ended it."""
        return self._process.returncode if self._process is not None else None

    async def exited(self) -> None:
        """Returns when it has ended."""
        if self._process is not None:
            await self._process.wait()

    async def ready(self, timeout_s: float) -> None:
        """Returns when its health says SERVING. Raises ProcessFailed when it ends first, or takes too long."""
        exited = asyncio.ensure_future(self.exited())
        healthy = asyncio.ensure_future(_until_ready(self.spec))
        try:
            await asyncio.wait({exited, healthy}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                raise self.failure()
            if not healthy.done():
                late = f"{self.spec.name} is not ready after {timeout_s:g} s (--start-timeout)"
                raise ProcessFailed(f"{late}; {self._log_end()}")
            healthy.result()
            self.serving = True
        finally:
            for task in (exited, healthy):
                task.cancel()
            await asyncio.gather(exited, healthy, return_exceptions=True)

    def failure(self) -> ProcessFailed:
        """How it ended, for people. What a signal ended is not explained by its log."""
        code = self.returncode or 0
        if code < 0:
            return ProcessFailed(
                f"{self.spec.name} was ended by {signal.Signals(-code).name}; its log: {self.log_path}"
            )
        ended = f"{self.spec.name} ended with exit code {code}"
        reason = _reason(self.log_tail())
        return ProcessFailed(f"{ended}: {reason}\n{self._log_end()}" if reason else f"{ended}; {self._log_end()}")

    def log_tail(self) -> str:
        """The last lines it wrote since its last start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def _log_end(self) -> str:
        return f"{self.log_path} ends with:\n{self.log_tail() or '(nothing)'}"

    def kill(self) -> None:
        """SIGKILL, to the process alone: what a crash looks like."""
        if self.running and self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Nothing that it started is left, either."""
        self.stopping = True
        if self._process is None:
            return
        family = _family(self.pid)
        if self.running:
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        # Those that appeared meanwhile as well. Only then is the process itself forgotten.
        for relative in {*family, *_family(self.pid)}:
            with contextlib.suppress(psutil.Error):
                relative.kill()
        self.kill()
        await self._process.wait()


def _reason(log: str) -> str:
    """The line with which a process says why it ends, or with which a traceback ends; empty if there is none."""
    lines = log.splitlines()
    said = [line.partition(": ")[2] for line in lines if re.match(r"outrider\.[\w.]+: ", line)]
    if said:
        return said[-1]
    return lines[-1] if lines and re.match(r"[A-Za-z_][\w.]*: ", lines[-1]) else ""


def _family(pid: int) -> set[psutil.Process]:
    """Descendants of `pid`, and all in its session: a child whose parent has died is found by that."""
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.Error):
        found.update(psutil.Process(pid).children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != pid and os.getsid(process.pid) == pid:
                found.add(process)
    return found


def open_log(path: Path) -> BinaryIO:
    """To append to; nobody else may read it, or put a link in its place."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "ab")


async def _until_ready(spec: ProcessSpec) -> None:
    if spec.answers is not None:
        await _until_answering(spec.answers)
    elif spec.address:
        await _until_serving(spec.address)


async def _until_answering(answers: Callable[[], bool]) -> None:
    while True:
        if await asyncio.to_thread(answers):
            return
        await asyncio.sleep(_HEALTH_POLL_S)


async def _until_serving(address: str) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from outrider.rpc.channel import create_channel

    async with create_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.RpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_HEALTH_POLL_S)
