"""One target worker process: load, serve, hold a lease, drain. Only wiring."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from contextlib import AsyncExitStack, suppress
from importlib.metadata import version

import torch

from outrider.engine import Engine, resolve, revision, tokenizer_fingerprint
from outrider.metadata.store import MetadataStore
from outrider.rpc.server import STOP_SIGNALS, create_server, serving
from outrider.rpc.v1 import target_pb2, target_pb2_grpc, worker_pb2
from outrider.target.config import TargetConfig
from outrider.target.events import DrainExpired
from outrider.target.opening import Limits
from outrider.target.prefix_publisher import PrefixPublisher
from outrider.target.scheduler import Batching
from outrider.target.server import PrefixListener, TargetServicer
from outrider.target.worker import TargetWorker

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name

_FLUSH_S = 2.0


def limit_cpu(config: TargetConfig) -> None:
    """Before the model is loaded: threads started later inherit it."""
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)
    if config.threads:
        torch.set_num_threads(config.threads)


async def run(config: TargetConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises CheckpointError, or OSError when it cannot listen."""
    started_s = time.monotonic()
    engine, info = await asyncio.to_thread(load, config)
    log.info("loaded %s in %.1f s", info.model, time.monotonic() - started_s)
    async with AsyncExitStack() as stack:
        store = MetadataStore.connect(config.metadata_url) if config.metadata_url else None
        if store is not None:
            await stack.enter_async_context(store)
        prefix = await stack.enter_async_context(PrefixPublisher(store, info.worker_id))
        servicer = await stack.enter_async_context(make_servicer(engine, info, config, prefix.note))
        server = create_server()
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
        life = await stack.enter_async_context(serving(server, config.listen, services=[SERVICE], signals=STOP_SIGNALS))
        await life.ready()
        address = config.advertise or life.address
        lease = store.register(info, address, servicer.load_message) if store is not None else None
        if lease is not None:
            await stack.enter_async_context(lease)
        log.info("worker %s serves %s at %s", info.worker_id, info.model, address)
        await life.draining.wait()
        servicer.start_drain()
        if lease is not None:
            lease.wake()
        await drain(servicer, config.drain_timeout_s)
    log.info("drained")


def load(config: TargetConfig) -> tuple[Engine, worker_pb2.WorkerInfo]:
    """The engine, and who this worker is. Raises CheckpointError."""
    path = resolve(config.model, log.info)
    engine = Engine.load(path, config.engine)
    model = engine.info
    info = worker_pb2.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        role=worker_pb2.WORKER_ROLE_TARGET,
        worker_id=f"target-{secrets.token_hex(6)}",
        model=config.served_name,
        model_revision=revision(path),
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
    engine: Engine, info: worker_pb2.WorkerInfo, config: TargetConfig, prefix_listener: PrefixListener
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
    return TargetServicer(worker, info, limits, prefix_listener)


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
