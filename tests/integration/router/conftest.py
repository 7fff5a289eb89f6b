"""A router, simulated workers and a real metadata server, all in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from outrider.draft.config import DraftConfig
from outrider.draft.process import describe
from outrider.draft.process import load as load_drafter
from outrider.draft.process import serve as serve_draft
from outrider.draft.service import DraftServicer
from outrider.engine import EngineConfig
from outrider.metadata import MetadataStore
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2_grpc, router_pb2_grpc, worker_pb2
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.target.config import TargetConfig
from outrider.target.process import load
from outrider.target.process import serve as serve_target
from outrider.target.service import TargetServicer
from outrider.worker.process import RunningWorker
from outrider_controller.cli.app import run
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control
from outrider_controller.router.config import (
    AdmissionConfig,
    FailoverConfig,
    LinkConfig,
    PolicyConfig,
    RouterConfig,
    TraceConfig,
)
from outrider_controller.router.process import RunningRouter, running_router

from tests.fakes import FakeDraft, FakeTarget, serving_draft, serving_target
from tests.redis_server import EmbeddedServer
from tests.route_call import RouteCall

T = TypeVar("T")

CONFIG = RouterConfig(
    refresh_s=0.05,
    cache_salt_key=b"test",
    traces=TraceConfig(record_tokens=True),
    policy=PolicyConfig(max_wait_us=20_000),
    failover=FailoverConfig(wait_for_target_s=2.0, stall_after_s=0.2, probe_timeout_s=0.2, draft_backoff_s=0.2),
    link=LinkConfig(first_backoff_s=0.02, max_backoff_s=0.1),
    admission=AdmissionConfig(queue_timeout_s=0.5),
)

ENGINE = EngineConfig(dtype="float32", num_blocks=256)


PERIODS = {
    "outrider.metadata.workers.lease.HEARTBEAT_S": 0.3,
    "outrider_controller.cli.change.cordon._POLL_S": 0.1,
    "outrider_controller.control.fleet.HEARTBEAT_S": 0.1,
    "outrider_controller.control.fleet.SETTLE_MS": 300,
    "outrider_controller.control.plan.kept_plan._SAVE_EVERY_S": 0.2,
    "outrider_controller.control.plan.leading._TICK_S": 0.1,
    "outrider_controller.control.plan.leading.PLAN_EVERY_S": 0.2,
    "outrider_controller.router.requests.plan_follower._LOOK_EVERY_S": 0.1,
}
"""Of what runs in this process: shorter than in operation, for tests wait for what comes of them. But not how often a
router plans: on a busy machine drafts cost, and before it has found that out most tests are over."""


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PERIODS.items():
        monkeypatch.setattr(name, value)


@pytest.fixture(scope="session")
def metadata_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("redis")
    with EmbeddedServer.start(directory) as server:
        yield server.url


@dataclass(slots=True)
class Answer:
    """Everything one call said."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[router.RouteResponse] = field(default_factory=list)

    @property
    def last(self) -> router.RouteResponse:
        return self.rounds[-1]

    @property
    def metrics(self) -> router.RequestMetrics:
        return self.last.metrics


@dataclass(slots=True)
class Fleet:
    """Starts workers and the router; everything stops with the test."""

    store: MetadataStore
    stack: AsyncExitStack
    num_workers: int = 0
    loads: list[Callable[[], Any]] = field(default_factory=list)
    """Of real workers."""
    targets: list[TargetServicer] = field(default_factory=list)
    drafts: list[DraftServicer] = field(default_factory=list)
    config: RouterConfig = CONFIG
    router: RunningRouter | None = None
    stub: router_pb2_grpc.RouterServiceAsyncStub | None = None

    async def target(self, target: FakeTarget | None = None) -> FakeTarget:
        target = await self.stack.enter_async_context(serving_target(target or FakeTarget()))
        self.num_workers += 1
        await self.stack.enter_async_context(self.store.register(target.info, target.address, lambda: target.load))
        return target

    async def draft(self, draft: FakeDraft | None = None) -> FakeDraft:
        draft = await self.stack.enter_async_context(serving_draft(draft or FakeDraft()))
        self.num_workers += 1
        await self.stack.enter_async_context(self.store.register(draft.info, draft.address, lambda: draft.load))
        return draft

    async def start(self, **changes: Any) -> RunningRouter:
        """Starts the router once all workers so far are listed; `changes` replace parts of its configuration."""
        async with asyncio.timeout(60):
            while len(await self.store.workers()) < self.num_workers:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        self.config = replace(CONFIG, **changes)
        self.router = await self.stack.enter_async_context(running_router(self.config, self.store))
        channel = await self.stack.enter_async_context(create_channel(self.router.address))
        self.stub = router_pb2_grpc.RouterServiceStub(channel)
        return self.router

    @staticmethod
    def request(prompt: Sequence[int] = (5, 6, 7), max_new_tokens: int = 40, **fields: Any) -> router.RouteRequest:
        """A greedy request; any field can be overridden."""
        defaults: dict[str, Any] = {
            "request_id": "r1",
            "tenant": "t",
            "model": "simulated",
            "prompt_token_ids": prompt,
            "sampling": sequence.Sampling(temperature=0, top_p=1),
            "stopping": sequence.Stopping(max_new_tokens=max_new_tokens),
        }
        return router.RouteRequest(**{**defaults, **fields})

    def call(self, request: router.RouteRequest, timeout: float | None = 20) -> RouteCall:
        assert self.stub is not None
        return RouteCall(self.stub, request, timeout)

    async def ask_until_drafted(self, request: router.RouteRequest) -> Answer:
        """On a busy machine a first answer may be over before its draft is connected: it is asked for again."""
        async with asyncio.timeout(60):
            while not (answer := await self.ask(request)).metrics.num_accepted_draft_tokens:
                pass
        return answer

    async def ask(self, request: router.RouteRequest, timeout: float | None = 20) -> Answer:
        answer = Answer()
        async for response in self.call(request, timeout):
            answer.rounds.append(response)
            answer.token_ids.extend(response.token_ids)
        return answer

    def counter(self, name: str, **labels: str) -> float:
        assert self.router is not None
        return self.router.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def fleet(metadata_url: str) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        # What the router makes of an answer is tested on machines too busy to give it in 50 ms as well.
        connecting = MetadataStore.connect(metadata_url, namespace=uuid4().hex, call_timeout_s=2.0)
        store = await stack.enter_async_context(connecting)
        yield Fleet(store, stack)


StartReal = Callable[..., Awaitable[Fleet]]


@pytest.fixture
async def start_real(fleet: Fleet, tiny: Path) -> StartReal:
    """Starts two targets with these lookups, and, if wanted, a draft with their weights: its guesses are good."""

    async def start(lookups: str = "", *, draft: bool = True, candidate: bool = False) -> Fleet:
        for _ in range(2):
            await real_target(fleet, tiny, lookups)
        for more in [{}] * draft + [{"candidate": True, "model_name": "new"}] * candidate:
            await real_draft(fleet, tiny, **more)
        # All engines share this process: a draft may take its time.
        await fleet.start(policy=PolicyConfig(max_wait_us=500_000))
        return fleet

    return start


@pytest.fixture
async def real_fleet(start_real: StartReal) -> Fleet:
    """These targets look nothing up, so a round's draft is the draft worker's."""
    return await start_real()


_REAL: dict[str, Any] = {"metadata_url": "", "listen": "127.0.0.1:0", "engine": ENGINE}


async def real_target(fleet: Fleet, model: Path, lookups: str = "") -> None:
    config = TargetConfig(**_REAL, model=str(model), model_name="tiny", lookups=lookups)
    engine, info = load(config)
    running = await fleet.stack.enter_async_context(serve_target(config, engine, info))
    # In the namespace of this test, which a configured URL does not name.
    leases = running.servicer.drafts._leases
    leases.read = partial(fleet.store.workers, worker_pb2.WORKER_ROLE_DRAFT)
    fleet.targets.append(running.servicer)
    await _register(fleet, info, running)


async def real_draft(fleet: Fleet, model: Path, **more: Any) -> None:
    config = DraftConfig(**_REAL, model=str(model), **more)
    drafter = load_drafter(config, model)
    info = describe(config, model, drafter)
    running = await fleet.stack.enter_async_context(serve_draft(config, drafter, info))
    fleet.drafts.append(running.servicer)
    await _register(fleet, info, running)


async def _register(fleet: Fleet, info: worker_pb2.WorkerInfo, running: RunningWorker[Any]) -> None:
    load_message = running.servicer.load_message
    await fleet.stack.enter_async_context(fleet.store.register(info, running.life.address, load_message))
    fleet.loads.append(load_message)
    fleet.num_workers += 1


@asynccontextmanager
async def control_plane(fleet: Fleet) -> AsyncIterator[control_pb2_grpc.ControlServiceAsyncStub]:
    """Its stub."""
    async with running_control(ControlConfig(), fleet.store) as life, create_channel(life.address) as channel:
        yield control_pb2_grpc.ControlServiceStub(channel)


# -- commands, as somebody types them


@dataclass(slots=True)
class Cluster:
    """It runs in a thread of its own, for commands run event loops of their own."""

    fleet: Fleet
    control: str
    loop: asyncio.AbstractEventLoop

    def within(self, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
        """The result of work in the cluster's loop."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work(self.fleet), self.loop)
        return future.result(60)


@asynccontextmanager
async def _running(metadata_url: str) -> AsyncIterator[tuple[Fleet, str]]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            MetadataStore.connect(metadata_url, namespace=uuid4().hex, call_timeout_s=5.0)
        )
        life = await stack.enter_async_context(running_control(ControlConfig(), store))
        yield Fleet(store, stack, num_workers=1), life.address


@pytest.fixture
def cluster(metadata_url: str) -> Iterator[Cluster]:
    started, stop = threading.Event(), threading.Event()
    made: list[Cluster] = []

    async def serve() -> None:
        async with _running(metadata_url) as (fleet, control):
            made.append(Cluster(fleet, control, asyncio.get_running_loop()))
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    yield made[0]
    stop.set()
    thread.join()


@pytest.fixture
def outrider(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command that has to succeed; gives what it printed, as JSON where that was asked for."""

    def command(*arguments: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert run([*arguments, "--control", cluster.control]) == code
        said = capsys.readouterr()
        if code:
            return said.err
        return json.loads(said.out) if "json" in arguments else said.out

    return command


def soon(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    give_up = threading.Event()
    for _ in range(round(within_s / 0.05)):
        if condition():
            return
        give_up.wait(0.05)
    raise AssertionError(f"not within {within_s} s")
