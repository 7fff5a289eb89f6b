"""One worker process from start to end: load, serve, hold a lease, drain. Only wiring."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import torch
from prometheus_client import CollectorRegistry

from outrider.engine import ModelInfo, weights_revision
from outrider.engine.checkpoints.fetching import directory
from outrider.metadata.keys import role_name
from outrider.protocol.identity import own_info
from outrider.rpc.access.credentials import cluster_port
from outrider.rpc.access.roles import RoleGuard
from outrider.rpc.server import ServerLife, create_server, serving
from outrider.rpc.v1 import worker_pb2
from outrider.runtime.collector import gc_frozen
from outrider.telemetry.logging import name_worker
from outrider.telemetry.metrics import Handshakes, MetadataCollector, RefusedCalls
from outrider.telemetry.ops import Ops, busy_check, serving_ops
from outrider.worker.config import WorkerConfig
from outrider.worker.gpus import GpuCollector, Gpus, metric_prefix, uuids_of
from outrider.worker.service import PrefixListener, WorkerServicer
from outrider.worker.watchdog import ending_hung_steps

if TYPE_CHECKING:
    from outrider.metadata.store import MetadataStore
    from outrider.metadata.workers.lease import Lease

log = logging.getLogger(__name__)

_FLUSH_S = 2.0


S = TypeVar("S", bound=WorkerServicer[Any, Any, Any, Any])


@dataclass(frozen=True, slots=True)
class RunningWorker(Generic[S]):
    servicer: S
    life: ServerLife
    lease: Lease | None
    """None without a metadata store."""
    ops_address: str = ""
    """HOST:PORT, or empty."""

    async def drain(self, timeout_s: float) -> None:
        """Refuses opens from now on. Returns when all sequences have finished; after `timeout_s` seconds the remaining
        ones are returned to their peers."""
        self.servicer.start_drain()
        if self.lease is not None:
            self.lease.wake()
        try:
            await asyncio.wait_for(self.servicer.drained.wait(), timeout_s)
        except TimeoutError:
            log.warning("%d sequences did not finish in time", self.servicer.load_message().num_running)
            self.servicer.expire_drain()
            await self.servicer.drained.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.servicer.streams.flushed(), _FLUSH_S)


Make = Callable[[CollectorRegistry, PrefixListener, "MetadataStore | None"], AbstractAsyncContextManager[S]]
"""Makes the servicer of a worker from its process's parts, in the event loop that will serve it."""


@asynccontextmanager
async def serve(
    config: WorkerConfig,
    info: worker_pb2.WorkerInfo,
    service: str,
    make: Make[S],
    add: Callable[[Any, grpc.aio.Server], None],
    *,
    signals: Sequence[signal.Signals] = (),
    devices: Sequence[str] = (),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[RunningWorker[S]]:
    """Within the block the worker serves `service`, and holds a lease if there is a metadata store.

    `make` makes the servicer; `add` adds it to a server; `devices`: torch's names of its devices; `notes`: for /readyz.

    Raises OSError when an address cannot be bound, and ValueError for an invalid metadata URL. An unreachable store
    raises nothing.
    """
    async with AsyncExitStack() as stack:
        ops = Ops(role_name(info.role), config, notes=dict(notes))
        store = await stack.enter_async_context(_connect(config, ops.registry)) if config.metadata_url else None
        gpus = Gpus.open(uuids_of(devices))
        gpus.describe(info)
        GpuCollector(ops.registry, gpus, metric_prefix(info.role))
        tell_prefix: PrefixListener = lambda added, removed: None  # noqa: E731
        if store is not None:
            tell_prefix = partial(store.publish_prefix, info.role, info.worker_id)
        servicer = await stack.enter_async_context(make(ops.registry, tell_prefix, store))
        refused = RefusedCalls(ops.registry, [service])
        handshakes = Handshakes(ops.registry)
        guard = RoleGuard(config.secret, certificates=config.tls is not None)
        server = create_server(guard=guard, on_refused=refused.count, on_tls_call=handshakes.called)
        add(servicer, server)
        credentials = cluster_port(config.tls, handshakes.began)
        life = await stack.enter_async_context(
            serving(server, config.listen, services=[service], signals=signals, credentials=credentials)
        )
        # What leaves the block below has drained: peers have nothing to wait for on their streams.
        stack.callback(servicer.streams.end)
        ops.live["step"] = busy_check(
            lambda: servicer.steps.busy_since_s, lambda: servicer.step_limit_s(config.step_timeout_s)
        )
        ops.live["engine"] = lambda: servicer.steps.problem
        ops.ready["server"] = lambda: life.problem
        ops_address = await stack.enter_async_context(serving_ops(ops, config.ops_listen))
        await life.ready()
        lease = None
        if store is not None:
            registration = store.register(
                info, config.advertised(life.address), lambda: gpus.report(servicer.load_message())
            )
            lease = await stack.enter_async_context(registration)
        yield RunningWorker(servicer, life, lease, ops_address)


async def serve_until_stopped(
    worker: AbstractAsyncContextManager[RunningWorker[S]],
    info: worker_pb2.WorkerInfo,
    config: WorkerConfig,
) -> None:
    """Serves until a stop signal, then drains. Ends the process when a step exceeds its limit."""
    async with worker as running:
        name_worker(info.worker_id)
        log.info("%s serves %s at %s", info.worker_id, info.model, running.life.address)
        servicer = running.servicer
        hung = ending_hung_steps(
            lambda: servicer.steps.busy_since_s, lambda: servicer.step_limit_s(config.step_timeout_s)
        )
        with gc_frozen(), hung:
            await running.life.draining.wait()
            await running.drain(config.drain_timeout_s)
    log.info("drained")


@asynccontextmanager
async def _connect(config: WorkerConfig, registry: CollectorRegistry) -> AsyncIterator[MetadataStore]:
    # Imported here: a worker without a metadata store needs no Redis client installed.
    from outrider.metadata.store import MetadataStore

    async with MetadataStore.connect(config.metadata_url) as store:
        MetadataCollector(registry, lambda: store.available, lambda: asdict(store.counters))
        yield store


def describe(
    config: WorkerConfig, role: worker_pb2.WorkerRole.ValueType, model: ModelInfo, head: str = "", **more: Any
) -> worker_pb2.WorkerInfo:
    """This worker's WorkerInfo, with a new id at every start. `head`: the one that a draft worker holds, or for which a
    target computes features. `more`: fields that only its kind of worker has."""
    return own_info(
        role,
        model=config.served_name,
        vocab_size=model.vocab_size,
        max_context_len=model.max_context_len,
        max_sequences=config.max_sequences,
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        device=model.device,
        dtype=model.dtype,
        features=weights_revision(directory(head), every=True) if head else "",
        feature_bits=8 if head else 0,
        **more,
    )


def limit_cpu(config: WorkerConfig) -> None:
    """Pins the process and bounds torch's threads. Before the model is loaded: threads started later inherit it."""
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)
    if config.threads:
        torch.set_num_threads(config.threads)
