"""Redis, paced targets, a router and a gateway, each in its own process: a real stack without a model."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ManagedProcess, ProcessSpec

from tests.redis_server import EmbeddedServer

_START_TIMEOUT_S = 60.0
_STOP_GRACE_S = 5.0


@dataclass(slots=True)
class PacedStack:
    """A running stack."""

    address: str
    """Address of public gRPC."""
    places: int
    """Sequences that all targets hold together."""
    processes: Mapping[str, ManagedProcess]

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of the processes that carry requests, in MiB."""
        names = ("gateway", "router")
        return {name: psutil.Process(self.processes[name].pid).memory_info().rss / 2**20 for name in names}


@asynccontextmanager
async def paced_stack(num_targets: int, places: int, queue_timeout_s: float) -> AsyncIterator[PacedStack]:
    """`places`: of each target. Raises ProcessFailed."""
    ports = Ports()
    router, gateway, http = (f"127.0.0.1:{ports.claim()}" for _ in range(3))
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
        url = stack.enter_context(EmbeddedServer.start(directory)).url
        own, metadata = (sys.executable, "-m"), ("--metadata", url)
        listen = ("--listen-grpc", gateway, "--listen-http", http)
        waiting = ("--listen", router, "--queue-timeout", str(queue_timeout_s))
        fleet = (url, str(num_targets), str(places))
        specs = (
            ProcessSpec("fleet", (*own, "benchmarks.support.paced_fleet", *fleet), ""),
            ProcessSpec("router", (*own, "outrider_controller.router", *metadata, *waiting), router),
            ProcessSpec("gateway", (*own, "outrider.gateway", *metadata, *listen), gateway),
        )
        processes = {}
        for spec in specs:
            process = processes[spec.name] = ManagedProcess(spec, directory / f"{spec.name}.log")
            await process.start()
            stack.push_async_callback(process.stop, _STOP_GRACE_S)
        for process in processes.values():
            await process.ready(_START_TIMEOUT_S)
        yield PacedStack(gateway, num_targets * places, processes)
