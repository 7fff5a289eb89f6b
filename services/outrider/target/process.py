"""One target worker process: load, serve, hold a lease, drain. Only wiring."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from prometheus_client import CollectorRegistry

from outrider.engine import Engine, resolve, revision, tokenizer_fingerprint
from outrider.engine.backends.cpu import start_helpers
from outrider.rpc.server import STOP_SIGNALS, ServerLife, create_server, serving
from outrider.rpc.v1 import target_pb2, target_pb2_grpc, worker_pb2
from outrider.target.config import TargetConfig
from outrider.target.draft_leases import ReadLeases, no_leases
from outrider.target.events import DrainExpired
from outrider.target.metrics import TargetMetrics
from outrider.target.opening import Limits
from outrider.target.prefix_publisher import PrefixPublisher
from outrider.target.scheduler import Batching
from outrider.target.server import PrefixListener, TargetServicer
from outrider.target.worker import TargetWorker
from outrider.telemetry.metrics import MetadataCollector, start_metrics_server

if TYPE_CHECKING:
    from outrider.engine.parallel.group import Group
    from outrider.metadata.store import MetadataStore

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name

_FLUSH_S = 2.0


def limit_cpu(config: TargetConfig) -> None:
    """Before the model is loaded: threads started later inherit it."""
    allowed = os.sched_getaffinity(0)
    own = set(config.cpu_cores) or allowed
    os.sched_setaffinity(0, own)
    if config.threads:
        torch.set_num_threads(config.threads)
    if (others := allowed - own) and config.engine.prefill_threads > torch.get_num_threads():
        variant = config.engine.native_variant
        # In this order: every step has the first ones.
        start_helpers(torch.get_num_threads() - 1, variant)
        os.sched_setaffinity(0, others)
        start_helpers(config.engine.prefill_threads - 1, variant)
        os.sched_setaffinity(0, own)


async def run(config: TargetConfig, group: Group | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains; as rank 0 of `group`, if there is one, which ends with it.

    Raises CheckpointError, or OSError when it cannot listen.
    """
    started_s = time.monotonic()
    if group is None:
        limit_cpu(config)
    # Loading blocks for seconds; the event loop has nothing to do meanwhile.
    engine, info = load(config, group)
    log.info("loaded %s in %.1f s", info.model, time.monotonic() - started_s)
    async with serve(config, engine, info, signals=STOP_SIGNALS) as (life, servicer):
        log.info("%s serves %s at %s", info.worker_id, info.model, life.address)
        if group is not None:
            group.watchdog.say_ready()
        await life.draining.wait()
        servicer.start_drain()
        await drain(servicer, config.drain_timeout_s)
    if group is not None:
        # The step thread has ended: nobody else tells the followers anything.
        group.stop()
    log.info("drained")


@asynccontextmanager
async def serve(
    config: TargetConfig,
    engine: Engine,
    info: worker_pb2.WorkerInfo,
    *,
    signals: Sequence[signal.Signals] = (),
) -> AsyncIterator[tuple[ServerLife, TargetServicer]]:
    """The worker as others see it: serving, and with a lease if there is a metadata store."""
    async with AsyncExitStack() as stack:
        registry = CollectorRegistry()
        store = await stack.enter_async_context(connect(config, registry)) if config.metadata_url else None
        prefix = await stack.enter_async_context(PrefixPublisher(store, info.worker_id))
        read_leases = partial(store.workers, worker_pb2.WORKER_ROLE_DRAFT) if store is not None else no_leases
        servicer = make_servicer(engine, info, config, registry, prefix.note, read_leases)
        await stack.enter_async_context(servicer)
        if config.metrics_listen:
            endpoint = start_metrics_server(config.metrics_listen, registry)
            stack.callback(endpoint.stop)
            log.info("metrics at http://%s/metrics", endpoint.address)
        server = create_server()
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
        life = await stack.enter_async_context(serving(server, config.listen, services=[SERVICE], signals=signals))
        await life.ready()
        if store is not None:
            address = config.advertise or life.address
            lease = await stack.enter_async_context(store.register(info, address, servicer.load_message))
            servicer.on_drain = lease.wake
        yield life, servicer


@asynccontextmanager
async def connect(config: TargetConfig, registry: CollectorRegistry) -> AsyncIterator[MetadataStore]:
    # Only here: a worker without a metadata store needs no Redis client installed.
    from outrider.metadata.store import MetadataStore

    async with MetadataStore.connect(config.metadata_url) as store:
        MetadataCollector(registry, lambda: store.available, lambda: asdict(store.counters))
        yield store


def load(config: TargetConfig, group: Group | None = None) -> tuple[Engine, worker_pb2.WorkerInfo]:
    """The engine, and who this worker is. Raises CheckpointError."""
    path = resolve(config.model, log.info)
    engine = Engine.load(path, config.engine, group)
    model = engine.info
    info = worker_pb2.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        role=worker_pb2.WORKER_ROLE_TARGET,
        worker_id=f"target-{secrets.token_hex(6)}",
        model=config.served_name,
        model_revision=revision(path, model, config.engine.quantization, shards=config.tensor_parallel),
        tokenizer_fingerprint=tokenizer_fingerprint(path),
        vocab_size=model.vocab_size,
        max_context_len=model.max_context_len,
        max_draft_tokens=config.max_draft_tokens,
        max_sequences=config.max_sequences,
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        device=model.device,
        dtype=model.dtype,
        version=version("outrider"),
    )
    return engine, info


def make_servicer(
    engine: Engine,
    info: worker_pb2.WorkerInfo,
    config: TargetConfig,
    registry: CollectorRegistry,
    prefix_listener: PrefixListener = lambda added, removed: None,
    read_leases: ReadLeases = no_leases,
) -> TargetServicer:
    """Must be called in the event loop that will serve."""
    limits = Limits(
        vocab_size=info.vocab_size,
        max_context_len=info.max_context_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_sequences=config.max_sequences,
        max_draft_tokens=config.max_draft_tokens,
    )
    batching = Batching(info.block_size, config.engine.max_batch_tokens)
    worker = TargetWorker(engine, limits, batching, time.monotonic)
    metrics = TargetMetrics(registry, info, worker.tally)
    return TargetServicer(worker, info, limits, prefix_listener, metrics, read_leases=read_leases)


async def drain(servicer: TargetServicer, timeout_s: float) -> None:
    """After start_drain: returns when all has finished, or once, after `timeout_s`, the routers have the rest back."""
    try:
        await asyncio.wait_for(servicer.drained.wait(), timeout_s)
    except TimeoutError:
        log.warning("%d sequences did not finish in time and are given back", servicer.load.num_sequences)
        servicer.post(DrainExpired())
        await servicer.drained.wait()
    with suppress(TimeoutError):
        await asyncio.wait_for(servicer.flushed(), _FLUSH_S)
