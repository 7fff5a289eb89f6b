"""The processes of one run: shipped workers and routers on simulated hosts."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from outrider.draft.service import DraftMetrics, DraftServicer
from outrider.draft.wire import ProposalLimits as DraftLimits
from outrider.draft.worker import DraftWorker
from outrider.drafters import ModelConfig, ModelDrafter
from outrider.drafting.lookup import NAMES
from outrider.drafting.source import make_sources
from outrider.rpc.v1 import draft_pb2_grpc, router_pb2_grpc, target_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sequence.key import SequenceKey
from outrider.sim.worker import Processor, VirtualSteps
from outrider.target.requests import events
from outrider.target.requests.limits import Limits as TargetLimits
from outrider.target.service import TargetServicer
from outrider.target.step.own_engine import OwnEngine
from outrider.target.step.scheduler import Batching, StepPlan
from outrider.target.step.worker import TargetWorker
from outrider.tree import DraftTree
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.observe.tracing import Traces
from outrider_controller.router.requests.dispatcher import Dispatcher
from outrider_controller.router.requests.service import RouterServicer
from prometheus_client import CollectorRegistry

from tests.fakes import fake_info
from tests.simulation.hash_model import VOCAB_SIZE, HashDecoder, HashEngine, argmax_id, guess
from tests.simulation.network import Host, Network
from tests.simulation.schedule import Schedule, WorkerPlan
from tests.simulation.store import SimulatedStore

# Under this name an error is a violation.
log = logging.getLogger("outrider.simulation")

MODEL = "simulated"
_SALT_KEY = b"simulation"


class Process(ABC):
    """One process at one place of the fleet; a restart is a new Process."""

    def __init__(self, name: str, address: str, network: Network) -> None:
        self.host = Host(name)
        self.address = address
        self.network = network
        self.draining = False
        self.troubled_until_s = asyncio.get_running_loop().time()
        """End of the last fault that may have affected its requests."""

    def trouble(self, until_s: float) -> None:
        self.troubled_until_s = max(self.troubled_until_s, until_s)

    async def kill(self) -> None:
        """Ends it at once, like kill -9."""
        self.network.kill(self.host)

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Resources that it still holds although no request runs."""


class StepFailed(RuntimeError):
    """A planted fault of a step."""


class Machine(Processor):
    """The processor of one worker."""

    def __init__(self, plan: WorkerPlan) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self.failures_due = 0
        self._plan = plan

    def compute(self, num_tokens: int) -> None:
        """One forward. Raises StepFailed when a failure is due."""
        self.spend(self._plan.step_s + self._plan.token_s * num_tokens)
        if self.failures_due:
            self.failures_due -= 1
            raise StepFailed("planted")


class Worker(Process):
    """A target or a draft."""

    def __init__(self, name: str, address: str, network: Network, plan: WorkerPlan) -> None:
        super().__init__(name, address, network)
        self.plan = plan
        self.machine = Machine(plan)
        self._steps: VirtualSteps
        self.on_broken: Callable[[], None] = lambda: None
        """The process ends itself."""

    def stall(self, until_s: float) -> None:
        """Stops the engine; the process still answers."""
        self.machine.stalled_until_s = until_s

    @abstractmethod
    def start_drain(self) -> None: ...

    @abstractmethod
    def expire_drain(self) -> None: ...

    def _make_steps(self, shipped: Any, deliver: Callable[[Any], None]) -> Any:
        self._steps = VirtualSteps(shipped, deliver, self.machine, end=lambda problem, error: self.on_broken())
        self.host.spawn(self._steps.run())
        return self._steps

    def _engine(
        self, schedule: Schedule, choose: Callable[..., int], doubt: Callable[..., int] | None = None
    ) -> HashEngine:
        decoder = HashDecoder(choose, self.machine.compute, doubt)
        plan = self.plan
        return HashEngine(
            decoder,
            num_blocks=plan.num_blocks,
            block_size=schedule.block_size,
            max_context_len=plan.max_context_len,
        )


class WatchedEngine(OwnEngine):
    """The shipped one. It logs an error when it would verify a token that its draft worker has taken back."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.newest: dict[tuple[SequenceKey, str], DraftTree] = {}

    def _plan(self, *given: Any) -> StepPlan:
        planned = super()._plan(*given)
        for row in planned.rows:
            for origin in map(row.draft.origin, range(len(row.draft))):
                newest = self.newest.get((row.sequence.key, origin.source), origin)
                # Each draft worker numbers its messages from 1 on.
                if origin.epoch < newest.epoch and origin.serial < newest.serial:
                    log.error("a token of epoch %d, after one of %d", origin.epoch, newest.epoch)
        return planned


class WatchedTarget(TargetWorker[Any]):
    def apply(self, event: events.Event) -> None:
        if isinstance(event, events.Offered) and event.tree.token_ids:
            self.engine.newest[event.key, event.tree.source] = event.tree  # type: ignore[attr-defined]
        super().apply(event)


class TargetProcess(Worker):
    def __init__(
        self, name: str, address: str, network: Network, store: SimulatedStore, schedule: Schedule, plan: WorkerPlan
    ) -> None:
        super().__init__(name, address, network, plan)
        self.engine = self._engine(schedule, argmax_id)
        limits = TargetLimits(
            VOCAB_SIZE, plan.max_context_len, schedule.block_size, plan.num_blocks, plan.max_sequences, 8
        )
        batching, sources = Batching(schedule.block_size, plan.max_batch_tokens), make_sources(NAMES)
        self.worker = WatchedTarget(WatchedEngine(self.engine, batching), limits, self.machine.clock, sources)
        info = fake_info(
            worker.WORKER_ROLE_TARGET,
            worker_id=name,
            model=MODEL,
            vocab_size=VOCAB_SIZE,
            max_context_len=plan.max_context_len,
            max_sequences=plan.max_sequences,
            block_size=schedule.block_size,
            num_blocks=plan.num_blocks,
        )
        self.servicer = TargetServicer(
            self.worker,
            info,
            limits,
            partial(store.prefix_changed, name),
            make_steps=self._make_steps,
            clock=self.machine.clock,
            connect=partial(network.channel, self.host),  # type: ignore[arg-type]
            read_leases=partial(store.workers, worker.WORKER_ROLE_DRAFT),
        )
        target_pb2_grpc.add_TargetServiceServicer_to_server(self.servicer, network.listen(self.host, address))
        store.register(self.host, info, address, self.servicer.load_message)

    async def kill(self) -> None:
        await super().kill()
        await self.servicer.drafts.links.stop()

    def start_drain(self) -> None:
        self.draining = True
        self.servicer.start_drain()

    def expire_drain(self) -> None:
        self.servicer.expire_drain()

    def leftovers(self) -> list[str]:
        found = [f"sequence {key} is open" for key in self.worker._sequences]
        found += [f"sequence {key} is known to the drafts' side" for key in self.servicer.drafts._open]
        if leak := self.engine.leaks():
            found.append(f"KV blocks are not free: {leak}")
        return found


class DraftProcess(Worker):
    def __init__(
        self, name: str, address: str, network: Network, store: SimulatedStore, schedule: Schedule, plan: WorkerPlan
    ) -> None:
        super().__init__(name, address, network, plan)
        # Where the draft is wrong, its second choice is right, so that branches matter.
        self.engine = self._engine(schedule, lambda tokens: guess(tokens, plan.accuracy), argmax_id)
        config = ModelConfig(max_batch_tokens=plan.max_batch_tokens, ready_lag=8, catch_up_tokens=12)
        self.drafter = ModelDrafter(self.engine, config)
        self.worker = DraftWorker(self.drafter, plan.max_sequences, self.machine.clock)
        info = fake_info(
            worker.WORKER_ROLE_DRAFT,
            worker_id=name,
            vocab_size=VOCAB_SIZE,
            max_context_len=plan.max_context_len,
            max_sequences=plan.max_sequences,
            block_size=self.drafter.info.block_size,
            num_blocks=self.drafter.info.num_blocks,
        )
        self.servicer = DraftServicer(
            self.worker,
            info,
            DraftLimits(plan.max_context_len, 8),
            DraftMetrics(CollectorRegistry(), info, self.worker.stats),
            partial(store.prefix_changed, name),
            make_steps=self._make_steps,
            clock=self.machine.clock,
        )
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self.servicer, network.listen(self.host, address))
        store.register(self.host, info, address, self.servicer.load_message)

    def start_drain(self) -> None:
        self.draining = True
        self.servicer.start_drain()

    def expire_drain(self) -> None:
        self.servicer.expire_drain()

    def leftovers(self) -> list[str]:
        sequences = self.worker._sequences
        found = [f"sequence {key} is open" for key in sequences.keys]
        found += [f"work is due for {key}" for key in sequences.due]
        if leak := self.engine.leaks():
            found.append(f"KV blocks are not free: {leak}")
        return found


class RouterProcess(Process):
    def __init__(
        self, name: str, address: str, network: Network, store: SimulatedStore, config: RouterConfig, first_id: int
    ) -> None:
        super().__init__(name, address, network)
        self.telemetry = RouterTelemetry(CollectorRegistry(), store)
        self._stack = AsyncExitStack()
        self.dispatcher = Dispatcher(
            store,
            config,
            self.telemetry,
            Traces(config.traces),
            connect=partial(network.channel, self.host),  # type: ignore[arg-type]
            first_id=first_id,
        )
        self._draining = asyncio.Event()
        self.servicer = RouterServicer(self.dispatcher, self.telemetry, config, _SALT_KEY, self._draining)
        router_pb2_grpc.add_RouterServiceServicer_to_server(self.servicer, network.listen(self.host, address))

    async def start(self) -> None:
        await self._stack.enter_async_context(self.telemetry.events.running())
        await self._stack.enter_async_context(self.dispatcher.running())

    async def stop(self) -> None:
        await self._stack.aclose()

    async def kill(self) -> None:
        await super().kill()
        await self.stop()

    def start_drain(self) -> None:
        self.draining = True
        self._draining.set()

    def leftovers(self) -> list[str]:
        dispatcher = self.dispatcher
        found = [f"{len(dispatcher.table.requests)} requests are active"] if dispatcher.table.requests else []
        found += [f"target sequence {i} is known" for i in dispatcher.table.by_target]
        found += [f"draft sequence {i} is known" for i in dispatcher.table.by_draft]
        workers: list[Any] = [*dispatcher.fleet.targets.values(), *dispatcher.fleet.drafts.values()]
        found += [f"{len(x.open_sequences)} sequences are open on {x.worker_id}" for x in workers if x.open_sequences]
        queue = dispatcher.admission
        if queue.num_running or queue.num_waiting:
            found.append(f"{queue.num_running} places are taken, {queue.num_waiting} requests wait for one")
        if self.servicer._num_calls:
            found.append(f"{self.servicer._num_calls} calls are counted")
        return found
