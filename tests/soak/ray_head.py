"""python -m tests.soak ray-head: the head of a Ray cluster is killed under load, and started again.

Two Ray nodes, each in a network namespace of its own, with a router on both; Redis, workers, gateway and clients
outside. Needs root, and Debian's iproute2.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import psutil
from outrider.errors import OutriderError
from outrider.metadata import LeaseRecord, MetadataStore
from outrider.metadata.connection.embedded import find_server
from outrider.rpc.v1 import worker_pb2
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.ask.hardware import hardware
from outrider_controller.cli.clusters.control import list_models
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import json_file_option, note, write_json
from outrider_controller.cli.up.process import ManagedProcess, ProcessSpec
from outrider_controller.cli.up.stack_options import run_async

from tests.soak.bridge import Bridge, why_not
from tests.soak.rolling import Load

HEAD, OTHER = "head", "other"
_RAY_PORT, _REDIS_PORT, _RAY_REDIS_PORT = 6399, 6379, 6380
_ROUTERS = 2
_START_TIMEOUT_S, _BACK_TIMEOUT_S = 180.0, 120.0
_CLIENTS = 2
_BACK_S = 30.0
_VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else all of Ray ends that has been without a head for a minute, which may be what a busy machine takes.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_raylet_start_wait_time_s": "120",
    # How soon the new head gives up what ran on the old one.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(slots=True)
class RayNodes:
    """The Ray cluster: a head that keeps its state in a Redis, and a second node."""

    bridge: Bridge
    directory: Path

    @property
    def address(self) -> str:
        return f"{self.bridge.address(HEAD)}:{_RAY_PORT}"

    @property
    def redis(self) -> str:
        return f"{self.bridge.outside}:{_RAY_REDIS_PORT}"

    async def start_head(self) -> None:
        temp_dir = tempfile.mkdtemp(dir=self.directory)
        options = ("--head", "--port", str(_RAY_PORT), "--include-dashboard=false", "--temp-dir", temp_dir)
        await asyncio.to_thread(self._start, HEAD, options, {"RAY_REDIS_ADDRESS": self.redis})

    async def start_other(self) -> None:
        await asyncio.to_thread(self._start, OTHER, ("--address", self.address), {})

    def _start(self, name: str, options: Sequence[str], variables: Mapping[str, str]) -> None:
        ray = (str(Path(sys.executable).parent / "ray"), "start", "--node-ip-address", self.bridge.address(name))
        limits = ("--num-cpus", "1", "--object-store-memory", "80000000", "--disable-usage-stats")
        with (self.directory / f"ray-{name}.log").open("ab") as log:
            subprocess.run(
                self.bridge.command(name, (*ray, *limits, *options)),
                env={**os.environ, **_VARIABLES, **variables},
                stdout=log,
                stderr=log,
                timeout=_START_TIMEOUT_S,
                check=True,
            )


@dataclass(slots=True)
class Cluster:
    """What serves, by the names of its processes."""

    nodes: RayNodes
    store: MetadataStore
    processes: dict[str, ManagedProcess]

    async def routers(self) -> list[LeaseRecord]:
        """Those that live and answer."""
        leased = await self.store.workers(worker_pb2.WORKER_ROLE_ROUTER)
        return [one for one in leased if psutil.pid_exists(one.pid) and await _serves(one.address)]

    async def all_routers(self, within_s: float) -> list[str]:
        """The nodes on which they serve, once they are as many as is asked for. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while len(found := await self.routers()) < _ROUTERS:  # noqa: ASYNC110  # Nobody announces them.
                await asyncio.sleep(0.2)
        return [one.address.rpartition(":")[0] for one in found]


async def _serves(address: str) -> bool:
    try:
        return any(model.num_targets for model in await list_models(address))
    except (CommandError, OutriderError):
        return False


@asynccontextmanager
async def cluster(bridge: Bridge, directory: Path) -> AsyncIterator[Cluster]:
    """Raises ProcessFailed, CalledProcessError."""
    host, model = bridge.outside, str(tiny_checkpoint(directory / "tiny"))
    (directory / "salt").write_text("s" * 32)
    nodes = RayNodes(bridge, directory)
    url = f"redis://{host}:{_REDIS_PORT}"
    processes: dict[str, ManagedProcess] = {}
    async with AsyncExitStack() as stack:

        async def start(spec: ProcessSpec) -> None:
            processes[spec.name] = process = ManagedProcess(spec, directory / f"{spec.name}.log")
            await process.start()
            stack.push_async_callback(process.stop, 20)

        for name, port in (("redis", _REDIS_PORT), ("ray-redis", _RAY_REDIS_PORT)):
            await start(_redis(name, host, port, directory))
        stack.callback(bridge.kill_all, HEAD)
        stack.callback(bridge.kill_all, OTHER)
        await nodes.start_head()
        await nodes.start_other()
        worker = ("--model", model, "--dtype", "float32", "--threads", "1", "--metadata", url, "--insecure")
        python, gateway = (sys.executable, "-m"), f"{host}:8001"
        for spec in (
            ProcessSpec("target", (*python, "outrider.target", *worker, "--listen", f"{host}:9001"), f"{host}:9001"),
            ProcessSpec("draft", (*python, "outrider.draft", *worker, "--listen", f"{host}:9002"), f"{host}:9002"),
            ProcessSpec(
                "gateway",
                (
                    *(*python, "outrider.gateway", "--metadata", url, "--insecure"),
                    *("--listen-grpc", gateway, "--listen-http", f"{host}:8000"),
                ),
                gateway,
            ),
            ProcessSpec(
                "controller",
                bridge.command(
                    OTHER,
                    (
                        *(*python, "outrider_controller", "--metadata", url, "--insecure"),
                        *("--ray-address", nodes.address, "--routers", str(_ROUTERS)),
                        *("--cache-salt-key-file", str(directory / "salt")),
                    ),
                ),
                "",
                env=_VARIABLES,
            ),
        ):
            await start(spec)
        store = await stack.enter_async_context(MetadataStore.connect(url))
        running = Cluster(nodes, store, processes)
        assert len(set(await running.all_routers(_START_TIMEOUT_S))) == _ROUTERS, "Ray did not spread them"
        await processes["gateway"].ready(_START_TIMEOUT_S)
        yield running


def _redis(name: str, host: str, port: int, directory: Path) -> ProcessSpec:
    data = directory / name
    data.mkdir()
    listens = ("--port", str(port), "--bind", host, "--protected-mode", "no", "--save", "", "--dir", str(data))
    return ProcessSpec(name, (find_server(), *listens), "")


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: int
    errors: Mapping[str, int]
    back_s: float
    """From the kill until as many routers serve as before."""


async def kill_head(bridge: Bridge, directory: Path, requests: int) -> Outcome:
    """With so many requests before the kill, and after the routers are back."""
    async with cluster(bridge, directory) as running:
        load = Load("tiny", f"{bridge.outside}:8000", f"{bridge.outside}:8001")
        await load.learn()
        async with load.running(_CLIENTS):
            await _more(load, requests)
            bridge.kill_all(HEAD)
            killed_s = time.monotonic()
            note("all is killed that ran on the node of the head")
            # A new head gives up what ran on the old one.
            starting = asyncio.create_task(running.nodes.start_head())
            await running.all_routers(_BACK_TIMEOUT_S)
            back_s = round(time.monotonic() - killed_s, 1)
            await starting
            await _more(load, requests)
    return Outcome(load.total, dict(load.errors), back_s)


async def _more(load: Load, requests: int) -> None:
    until = load.total + requests
    while load.total < until:  # noqa: ASYNC110  # A count, which nobody announces.
        await asyncio.sleep(0.1)


@click.command("ray-head")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Clusters whose head is killed.")
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True, help="Before and after each kill.")
@json_file_option
def ray_head(repeats: int, requests: int, json_file: Path | None) -> int:
    """Kill all that runs on the node of a Ray cluster's head: does a request fail, and when are the routers back?

    Two nodes with a router each, in two network namespaces; the head keeps its state in a Redis.
    """
    if reason := why_not():
        note(f"skipped: {reason}")
        return ExitCode.OK
    return run_async(_ray_head(repeats, requests, json_file))


async def _ray_head(repeats: int, requests: int, json_file: Path | None) -> int:
    outcomes = []
    for _ in range(repeats):
        # Ray's sockets have long names.
        with tempfile.TemporaryDirectory(prefix="rh-", dir="/tmp") as scratch, Bridge.made((HEAD, OTHER)) as bridge:
            outcomes.append(found := await kill_head(bridge, Path(scratch), requests))
        failed = sum(found.errors.values())
        click.echo(f"{found.requests} requests, {failed} failed {found.errors or ''}; routers back in {found.back_s} s")
    holds = all(not one.errors and one.back_s <= _BACK_S for one in outcomes)
    write_json(
        json_file, "soak-ray-head", {"holds": holds, "kills": [asdict(one) for one in outcomes], "hardware": hardware()}
    )
    return ExitCode.OK if holds else ExitCode.ERROR
