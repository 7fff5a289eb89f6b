"""The whole stack on one machine, for `async with`: every process for real, started together, stopped in reverse.

async with Stack(StackConfig()) as stack:
    ...                              # stack.gateway_grpc, stack.gateway_http, stack.control, stack.routers
    stack.processes["draft-0"].kill()
    await stack.restart("draft-0")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil
from outrider.metadata import MetadataStore
from outrider.metadata.connection.embedded import ServerCommand
from outrider.rpc.access.roles import ClusterSecret, Role
from outrider.rpc.v1 import control_pb2
from outrider.user_cache import cache_directory, private_directory

from outrider_controller.cli.clusters.control import list_models, list_workers
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import HEAD, SURE_DRAFTS, asked, fetched
from outrider_controller.cli.up.best_way import with_best_way
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ManagedProcess, ProcessFailed, ProcessSpec
from outrider_controller.cli.up.stack_config import Cores, StackConfig, StackPlan, StackPlanner

_ASSEMBLY_TIMEOUT_S = 30.0
_POLL_S = 0.1

Report = Callable[[str], None]
Amend = Callable[[StackPlan, Ports], StackPlan]


def unamended(plan: StackPlan, ports: Ports) -> StackPlan:
    return plan


class Stack:
    """Raises ProcessFailed, with the last lines of the log, when a process does not come up."""

    gateway_grpc: str
    gateway_http: str
    control: str
    routers: tuple[str, ...]
    ops: Mapping[str, str]
    """Address of each process's ops port, by its name."""
    run_dir: Path
    target_path: Path
    metadata_url: str
    cores: Cores

    def __init__(self, config: StackConfig, report: Report = lambda line: None, amend: Amend = unamended) -> None:
        """`amend` may change which processes are started, and with which options."""
        self.config = config
        self.processes: dict[str, ManagedProcess] = {}
        self._report = report
        self._amend = amend
        self._exits = AsyncExitStack()
        self._ports = Ports()

    async def __aenter__(self) -> Stack:
        async with AsyncExitStack() as exits:
            await self._start(exits)
            # Everything is up: what was opened is now closed by __aexit__.
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def _start(self, exits: AsyncExitStack) -> None:
        await self._check_store()
        self.target_path = await fetched(self.config.target_model, self._report, self.config.engine)
        if self.config.measured:
            self.config = await with_best_way(self.config, self.target_path, self._report)
        if self.config.drafts and self.config.draft not in SURE_DRAFTS:
            await fetched(self.config.draft, self._report, self.config.draft_engine)
        for head in self.config.heads - SURE_DRAFTS:
            await asked(head, HEAD, self._report)
        started_s = time.monotonic()
        self.run_dir = _make_run_dir(self.config.run_dir)
        self._report(f"logs in {self.run_dir}")
        redis = [] if self.config.metadata_url else [self._redis(exits)]
        self.metadata_url = self.config.metadata_url or redis[0].address
        planner = StackPlanner(self.config, self.target_path, self.metadata_url, sorted(os.sched_getaffinity(0)))
        self.cores = planner.cores
        try:
            plan = self._amend(planner.plan(self._ports), self._ports)
        except OSError as error:
            raise ProcessFailed(str(error)) from error
        self.gateway_grpc, self.gateway_http = plan.gateway.address, plan.gateway.endpoints["http"]
        self.control, self.routers, self.ops = plan.controller.address, plan.routers, plan.ops
        self.scrape_file.write_text(json.dumps(scrape_targets(self.ops), indent=2) + "\n")
        await exits.enter_async_context(self._running([redis, *plan.tiers]))
        await self.all_ready(started_s)
        await self.assembled()
        if self.config.realtime:
            first = asyncio.create_task(keep_first(self.processes))
            exits.callback(first.cancel)

    async def _check_store(self) -> None:
        """Raises ProcessFailed where waiting for the store would not help."""
        if self.config.metadata_url:
            async with MetadataStore.connect(self.config.metadata_url) as store:
                if (problem := await store.problem()) is not None:
                    raise ProcessFailed(f"metadata: {problem}")

    def _redis(self, exits: AsyncExitStack) -> ProcessSpec:
        try:
            command = ServerCommand.prepare(self.run_dir, self.config.state_dir)
        except (FileNotFoundError, RuntimeError) as error:
            raise ProcessFailed(str(error)) from error
        exits.callback(command.remove_socket)
        return ProcessSpec("redis", command.argv, command.url, answers=command.answers)

    @asynccontextmanager
    async def _running(self, tiers: Sequence[Sequence[ProcessSpec]]) -> AsyncIterator[None]:
        """All processes at once: each waits by itself for what it needs. Later tiers stop first."""
        try:
            for spec in (spec for tier in tiers for spec in tier):
                await self._launch(spec)
            yield
        finally:
            for tier in reversed(tiers):
                await self._stop([spec.name for spec in tier])

    async def _launch(self, spec: ProcessSpec) -> ManagedProcess:
        process = ManagedProcess(spec, self.run_dir / f"{spec.name}.log")
        self.processes[spec.name] = process
        await process.start()
        return process

    async def _stop(self, names: Sequence[str]) -> None:
        processes = [self.processes[name] for name in names if name in self.processes]
        for process in processes:
            process.stopping = True
        await asyncio.gather(*(process.stop(self.config.stop_timeout_s) for process in processes))

    async def all_ready(self, started_s: float) -> None:
        """Raises ProcessFailed when one is not ready in time, or ends, also after it was ready: others wait for it."""

        async def ready(process: ManagedProcess) -> None:
            await process.ready(self.config.start_timeout_s)
            self._report(f"{process.spec.name} is ready ({time.monotonic() - started_s:.1f} s)")

        waiting = asyncio.gather(*(ready(process) for process in self.processes.values()))
        ended = asyncio.ensure_future(self.first_failure())
        both: tuple[asyncio.Future[Any], ...] = (waiting, ended)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ended.result().failure()
            waiting.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def assembled(self) -> None:
        """Returns when every router pairs every worker. Raises ProcessFailed when they do not find one another."""
        want = self.config.targets, self.config.drafts
        deadline_s = time.monotonic() + _ASSEMBLY_TIMEOUT_S
        while True:
            counts = [await self._paired(router) for router in self.routers]
            if all(have[0] >= want[0] and have[1] >= want[1] for have in counts):
                return
            if time.monotonic() > deadline_s:
                seen = "; ".join(f"{have[0]} of {want[0]} targets, {have[1]} of {want[1]} drafts" for have in counts)
                tail = self.processes["controller"].log_tail()
                raise ProcessFailed(f"the routers did not find all workers: {seen}; the controller's log says:\n{tail}")
            await asyncio.sleep(_POLL_S)

    @property
    def _token(self) -> str:
        """Of the operator."""
        file = self.config.secret_file
        return ClusterSecret.read(file).token(Role.OPERATOR) if file is not None else ""

    async def _paired(self, router: str) -> tuple[int, int]:
        with contextlib.suppress(CommandError):
            for model in await list_models(router, self._token):
                if model.model == self.config.model:
                    return model.num_targets, model.num_drafts
        return 0, 0

    async def restart(self, name: str, spec: ProcessSpec | None = None) -> None:
        """Starts a process again, ending it first if it runs; with another spec if one is given. Waits until ready.

        Raises KeyError for an unknown name.
        """
        process = await self.relaunch(name, spec)
        await process.ready(self.config.start_timeout_s)

    async def relaunch(self, name: str, spec: ProcessSpec | None = None) -> ManagedProcess:
        """As `restart`, without waiting until it is ready. Nothing that the old process started is left."""
        old = self.processes[name]
        await self._stop([name])
        return await self._launch(spec or old.spec)

    async def first_failure(self) -> ManagedProcess:
        """Returns the first process that ends unasked."""
        while True:
            watched = [process for process in self.processes.values() if not process.stopping]
            for process in watched:
                if not process.running:
                    return process
            await asyncio.sleep(_POLL_S)

    @property
    def scrape_file(self) -> Path:
        """For Prometheus' `file_sd_configs`."""
        return self.run_dir / "prometheus.json"

    async def workers(self) -> list[control_pb2.WorkerStatus]:
        """Everyone with a lease. Raises CommandError while the control plane is away."""
        return list((await list_workers(self.control, token=self._token)).workers)

    @property
    def endpoints(self) -> dict[str, str]:
        return {
            "model": self.config.model,
            "grpc": self.gateway_grpc,
            "http": self.gateway_http,
            "control": self.control,
        }


def scrape_targets(ops: Mapping[str, str]) -> list[dict[str, Any]]:
    """What Prometheus reads from a file to find the processes: all under our names, and under vLLM's what has them."""
    return [
        {"targets": [address], "labels": {"process": name, "__metrics_path__": path}}
        for name, address in ops.items()
        for path in ("/metrics", *(["/metrics/vllm"] if name.startswith(("gateway", "target")) else []))
    ]


def _make_run_dir(wanted: Path | None) -> Path:
    """Raises OSError when it cannot be made, or others may write into it."""
    if wanted is None:
        runs = cache_directory() / "run"
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        runs.chmod(0o700)
        wanted = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return private_directory(wanted.expanduser().resolve())


_DRAFT, _ROUTER = 2, 1
_ROUTER_TITLE = "ray::Router"
_PERIOD_S = 5.0


async def keep_first(processes: Mapping[str, ManagedProcess]) -> NoReturn:
    """Until cancelled: of those that serve, and of what is started in their place."""
    while True:
        await put_first(processes)
        await asyncio.sleep(_PERIOD_S)


async def put_first(processes: Mapping[str, ManagedProcess]) -> None:
    # Loading is not short: what starts does it like all others.
    for name, process in processes.items():
        if process.serving and name.startswith("draft-"):
            go_first(process.pid, _DRAFT)
        elif process.serving and name == "controller":
            for pid in await asyncio.to_thread(_routers, process.pid):
                go_first(pid, _ROUTER)


def go_first(pid: int, priority: int) -> bool:
    """All threads of the process, and those that they start from now on. False where the system does not permit it."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(priority))
    except (AttributeError, OSError):
        return False
    return True


def _routers(controller: int) -> list[int]:
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(controller).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).startswith(_ROUTER_TITLE):
                    found.append(child.pid)
    return found
