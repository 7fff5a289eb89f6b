"""python -m tests.soak rolling"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import click
import grpc
import httpx
import psutil
from outrider.hardware import hardware
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan
from outrider_controller.cli.up.stack_options import run_async

_HOST = "127.0.0.1"
_PROMPTS = ("Once upon a time", "Why is the sky blue?", "List the planets.", "Write a haiku about the sea.")
_MAX_TOKENS = 24
# As in the chart.
_DRAIN_DELAY_S = 5.0
_LOOK_S = 0.1
_LOOK_TIMEOUT_S = 1.0


@dataclass(slots=True)
class Backend:
    """One gateway as a load balancer sees it."""

    name: str
    ops: str
    ready: bool = False


@dataclass(slots=True)
class Balancer:
    """Passes connections on to gateways that say that they are ready; those that are open stay where they are."""

    backends: dict[str, Backend]
    """By the address to which connections go."""
    _turn: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def all_ready(self) -> bool:
        return all(backend.ready for backend in self.backends.values())

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        looking = asyncio.create_task(self._look())
        server = await asyncio.start_server(self._carry, _HOST, 0)
        try:
            yield f"{_HOST}:{server.sockets[0].getsockname()[1]}"
        finally:
            looking.cancel()
            server.close()

    async def _look(self) -> None:
        async with httpx.AsyncClient(timeout=_LOOK_TIMEOUT_S) as http:
            while True:
                for backend in self.backends.values():
                    backend.ready = await _ready(http, backend.ops)
                await asyncio.sleep(_LOOK_S)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = [address for address, backend in self.backends.items() if backend.ready]
        if not ready:
            writer.close()
            return
        host, port = ready[next(self._turn) % len(ready)].rsplit(":", 1)
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass(reader, back), _pass(there, writer))


async def _ready(http: httpx.AsyncClient, ops: str) -> bool:
    with suppress(httpx.HTTPError):
        return (await http.get(f"http://{ops}/readyz")).status_code == 200
    return False


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()


@dataclass(slots=True)
class Load:
    """Clients as they come: one connection each, kept open, and no retry of their own."""

    model: str
    http: str
    grpc: str
    expected: dict[str, str] = field(default_factory=dict)
    """By prompt: what an undisturbed answer says."""
    ended: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.ended.total()

    async def learn(self) -> None:
        """Undisturbed answers, without speculation."""
        async with httpx.AsyncClient(timeout=120) as http:
            for prompt in _PROMPTS:
                self.expected[prompt] = await self._by_http(http, prompt, speculation="off")

    @asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        over = asyncio.Event()
        tasks = [asyncio.create_task(kind(over)) for _ in range(clients) for kind in (self._http, self._grpc)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)

    async def _http(self, over: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            await self._ask(over, "http", lambda prompt: self._by_http(http, prompt))

    async def _by_http(self, http: httpx.AsyncClient, prompt: str, speculation: str = "auto") -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await http.post(f"http://{self.http}/v1/completions", json={**body, "speculation": speculation})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    async def _grpc(self, over: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(self.grpc) as channel:
            stub: generation_pb2_grpc.GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(channel)

            async def ask(prompt: str) -> str:
                options = generation_pb2.GenerationOptions(max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
                request = generation_pb2.GenerateRequest(model=self.model, text=prompt, options=options)
                call = stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request), timeout=120)
                return "".join([chunk.text async for chunk in call])

            await self._ask(over, "grpc", ask)

    async def _ask(self, over: asyncio.Event, kind: str, ask: Callable[[str], Awaitable[str]]) -> None:
        for prompt in itertools.cycle(_PROMPTS):
            if over.is_set():
                return
            try:
                equal = await ask(prompt) == self.expected[prompt]
                if not equal:
                    self.errors[f"{kind}: another text"] += 1
            except (httpx.HTTPError, grpc.RpcError) as error:
                text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self.errors[f"{kind}: {type(error).__name__}: {text}"[:200]] += 1
            self.ended[kind] += 1


def in_twos(ray: bool, plan: StackPlan, ports: Ports) -> StackPlan:
    """Two gateways; and two routers that can be restarted one by one: each as a process of its own, or in a Ray of its
    own, with a controller and a control plane."""
    gateway = plan.gateway
    delay = ("--drain-delay", f"{_DRAIN_DELAY_S:g}")
    metadata = ("--metadata", gateway.env["OUTRIDER_METADATA"])
    by_grpc, http, ops = (f"{_HOST}:{ports.claim()}" for _ in range(3))
    listens = ("--listen-grpc", by_grpc, "--listen-http", http, "--ops-listen", ops)
    python = (sys.executable, "-m", "outrider.gateway")
    ends = {"http": http, "ops": ops}
    second = ProcessSpec("gateway-1", (*python, *metadata, *listens, *delay), by_grpc, ends)
    control, *others = (_controllers if ray else _plain)(plan, ports, metadata)
    return replace(
        plan,
        controller=control,
        gateway=replace(gateway, argv=(*gateway.argv, *delay)),
        others=(*plan.others, *others, second),
    )


def without_ray(plan: StackPlan, ports: Ports) -> StackPlan:
    """Routers and control plane are processes like the others."""
    control, *routers = _plain(plan, ports, ("--metadata", plan.gateway.env["OUTRIDER_METADATA"]))
    return replace(plan, controller=control, others=(*plan.others, *routers))


def _plain(plan: StackPlan, ports: Ports, metadata: tuple[str, ...]) -> list[ProcessSpec]:
    """Routers and a control plane, each a process of its own."""
    control = _process(
        "controller", "outrider_controller.control", plan.controller.address, plan.ops["control"], metadata
    )
    return [
        control,
        *(
            _process(f"router-{n}", "outrider_controller.router", address, plan.ops[f"router-{n}"], metadata)
            for n, address in enumerate(plan.routers)
        ),
    ]


def _controllers(plan: StackPlan, ports: Ports, metadata: tuple[str, ...]) -> list[ProcessSpec]:
    """A controller with a Ray of its own for each router."""
    controls = [plan.controller.address, *(f"{_HOST}:{ports.claim()}" for _ in plan.routers[1:])]
    specs = []
    for number, (router, control) in enumerate(zip(plan.routers, controls, strict=True)):
        listens = ("--router-listen", router, "--control-listen", control)
        ops = ("--router-ops-listen", plan.ops[f"router-{number}"])
        name = f"controller-{number}" if number else "controller"
        specs.append(
            ProcessSpec(name, (sys.executable, "-m", "outrider_controller", *metadata, *listens, *ops), router)
        )
    return specs


def _process(name: str, module: str, address: str, ops: str, metadata: tuple[str, ...]) -> ProcessSpec:
    argv = (sys.executable, "-m", module, *metadata, "--listen", address, "--ops-listen", ops)
    return ProcessSpec(name, argv, address, {"ops": ops})


@dataclass(frozen=True, slots=True)
class Restart:
    process: str
    exit_code: int | None
    seconds: float
    requests: int
    failed: int

    @property
    def in_order(self) -> bool:
        """A controller whose Ray was killed ends itself, with an error."""
        return self.exit_code == (1 if self.process.endswith(RAY_SERVERS) else 0)


RAY_SERVERS = ("raylet", "gcs_server")
"""A Ray of a controller's own consists of them."""


async def roll(stack: Stack, load: Load, names: list[str]) -> list[Restart]:
    """Each process ends by SIGTERM and starts again, once the one before is back. Servers of Ray are killed."""
    found = []
    for name in names:
        begun_s, before, failed = time.monotonic(), load.total, load.errors.total()
        exit_code = await (_restart_ray if name.endswith(RAY_SERVERS) else _restart)(stack, name)
        await stack.assembled()
        # What runs in the gateways looks for routers once a second.
        await asyncio.sleep(2.0)
        seconds = round(time.monotonic() - begun_s, 1)
        found.append(Restart(name, exit_code, seconds, load.total - before, load.errors.total() - failed))
        failures = dict(load.errors) if found[-1].failed else ""
        note(f"{name} was restarted in {seconds} s; {found[-1].failed} of {found[-1].requests} failed {failures}")
    return found


async def _restart(stack: Stack, name: str) -> int | None:
    old = stack.processes[name]
    await stack.restart(name)
    return old.returncode


async def _restart_ray(stack: Stack, name: str) -> int | None:
    """CONTROLLER SERVER: that server of its Ray is killed, and the controller started again."""
    controller, server = name.split()
    old = stack.processes[controller]
    old.stopping = True
    for child in psutil.Process(old.pid).children(recursive=True):
        if child.name() == server:
            child.kill()
    await old.exited()
    await stack.restart(controller)
    return old.returncode


def _names(stack: Stack) -> list[str]:
    """Of all that is restarted: Redis last, and after each controller the servers of its Ray."""
    controllers = [name for name in stack.processes if "outrider_controller" in stack.processes[name].spec.argv]
    names = [name for name in stack.processes if name != "redis"]
    return [*names, *(f"{one} {server}" for one in controllers for server in RAY_SERVERS), "redis"]


@click.command("rolling")
@click.option("--requests", type=click.IntRange(1), default=3000, show_default=True, help="As many at least.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Times that all are restarted.")
@click.option("--clients", type=click.IntRange(1, 64), default=2, show_default=True, help="Of HTTP, and of gRPC.")
@click.option("--ray/--no-ray", default=False, help="Routers in two Rays, each with a controller of its own.")
@json_file_option
def rolling(requests: int, rounds: int, clients: int, ray: bool, json_file: Path | None) -> int:
    """Restart every process in turn under stock clients: does a request fail, is a text another?

    Redis; two of each of targets, drafts, routers and gateways, one control plane; tiny models, float32. With --ray a
    controller and a control plane for each router; each Ray's servers are killed, too. Clients keep one connection each
    to a balancer that asks gateways whether they are ready, and retry nothing.
    """
    return run_async(_rolling(requests, rounds, clients, ray, json_file))


async def _rolling(requests: int, rounds: int, clients: int, ray: bool, json_file: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="rolling-") as scratch:
        model = str(tiny_checkpoint(Path(scratch) / "tiny"))
        config = StackConfig(
            target_model=model,
            draft_model=model,
            targets=2,
            drafts=2,
            routers=2,
            target_args=f"--dtype float32 --kv-cache-bytes {64 << 20}",
            draft_args=f"--dtype float32 --kv-cache-bytes {64 << 20}",
            run_dir=Path(scratch) / "run",
        )
        async with Stack(config, note, partial(in_twos, ray)) as stack:
            load, restarts = await _under_load(stack, requests, rounds, clients)
    rows = [[r.process, r.exit_code, r.seconds, r.requests, r.failed] for r in restarts]
    click.echo(columns(["PROCESS", "EXIT CODE", "SECONDS", "REQUESTS", "FAILED"], rows))
    click.echo(f"{load.total} requests ({dict(load.ended)}), {load.errors.total()} failed {dict(load.errors)}")
    holds = not load.errors and load.total >= requests and all(restart.in_order for restart in restarts)
    fields = ("process", "exit_code", "seconds", "requests", "failed")
    listed = [{name: getattr(one, name) for name in fields} for one in restarts]
    sums = {"requests": load.total, "errors": dict(load.errors), "restarts": listed}
    write_json(json_file, "soak-rolling", {"holds": holds, **sums, "hardware": hardware()})
    return ExitCode.OK if holds else ExitCode.ERROR


async def _under_load(stack: Stack, requests: int, rounds: int, clients: int) -> tuple[Load, list[Restart]]:
    gateways = [stack.processes[name].spec for name in ("gateway", "gateway-1")]
    by_http = Balancer({one.endpoints["http"]: Backend(one.name, one.endpoints["ops"]) for one in gateways})
    by_grpc = Balancer({one.address: Backend(one.name, one.endpoints["ops"]) for one in gateways})
    async with by_http.listening() as http, by_grpc.listening() as grpc_address:
        load, restarts = Load(stack.config.model, http, grpc_address), []
        await _until(lambda: by_http.all_ready and by_grpc.all_ready)
        await load.learn()
        async with load.running(clients):
            for _ in range(rounds):
                restarts += await roll(stack, load, _names(stack))
            await _until(lambda: load.total >= requests)
    return load, restarts


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # Counts and flags, which nobody announces.
        await asyncio.sleep(_LOOK_S)
