"""One draft worker process from start to end: bound, loaded, announced, drained, gone."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from outrider.draft.config import DraftConfig
from outrider.draft.events import DrainExpired, DrainStarted
from outrider.draft.lease import Announcer
from outrider.draft.metrics import DraftMetrics
from outrider.draft.service import DraftServicer
from outrider.draft.wire import Limits
from outrider.draft.worker import DraftWorker
from outrider.drafters import Drafter, load_drafter
from outrider.engine import resolve, tokenizer_fingerprint, weights_revision
from outrider.rpc.server import STOP_SIGNALS, ServerLife, create_server, serving
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from outrider.telemetry.metrics import start_metrics_server

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


def load(config: DraftConfig, path: Path) -> Drafter:
    """The drafter that `config` asks for, from the checkpoint at `path`."""
    return load_drafter(config.kind, path, engine=config.engine, model=config.drafting, ngram=config.ngrams)


async def run(config: DraftConfig, load: Callable[[DraftConfig, Path], Drafter] = load) -> None:
    """Serves until a stop signal, then drains. Raises CheckpointError or OSError when it cannot start."""
    prepare_cpu(config)
    # Loading blocks for seconds; the event loop has nothing to do meanwhile.
    path = resolve(config.model, lambda line: log.info("%s", line))
    drafter = load(config, path)
    info = describe(config, path, drafter)
    async with serve(config, drafter, info, signals=STOP_SIGNALS) as (life, servicer):
        log.info("%s serves %s (%s) at %s", info.worker_id, info.model, info.draft_kind, life.address)
        await life.draining.wait()
        await drain(servicer, config.drain_timeout_s)
    log.info("drained")


@asynccontextmanager
async def serve(
    config: DraftConfig,
    drafter: Drafter,
    info: worker_pb2.WorkerInfo,
    *,
    signals: tuple[signal.Signals, ...] = (),
) -> AsyncIterator[tuple[ServerLife, DraftServicer]]:
    """The worker as others see it: serving, with a lease if there is a metadata store."""
    limits = Limits(drafter.info.vocab_size, drafter.info.max_context_len, config.max_draft_tokens)
    announcer = Announcer(info)
    async with AsyncExitStack() as stack:
        worker = DraftWorker(drafter, config.max_sequences)
        metrics = DraftMetrics(registry := CollectorRegistry(), info, worker.tally)
        if config.metrics_listen:
            stack.callback(start_metrics_server(config.metrics_listen, registry).stop)
        servicer = await stack.enter_async_context(DraftServicer(worker, info, limits, metrics, announcer.changed))
        server = create_server()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
        life = await stack.enter_async_context(serving(server, config.listen, services=[SERVICE], signals=signals))
        if config.metadata_url:
            address = config.advertise or life.address
            await stack.enter_async_context(announcer.announced(config.metadata_url, address, servicer.load_message))
        await life.ready()
        yield life, servicer


async def drain(servicer: DraftServicer, timeout_s: float) -> None:
    """Nothing new; waits for the open sequences, and gives back what is left after `timeout_s`."""
    servicer.post(DrainStarted())
    try:
        async with asyncio.timeout(timeout_s):
            await servicer.drained.wait()
    except TimeoutError:
        servicer.post(DrainExpired())
        await servicer.drained.wait()


def describe(config: DraftConfig, path: Path, drafter: Drafter) -> worker_pb2.WorkerInfo:
    """Who this worker is; made anew at every start."""
    info = drafter.info
    return worker_pb2.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        role=worker_pb2.WORKER_ROLE_DRAFT,
        worker_id=f"draft-{uuid.uuid4().hex[:12]}",
        model=config.served_name,
        model_revision=weights_revision(path, config.engine.quantization),
        tokenizer_fingerprint=tokenizer_fingerprint(path),
        vocab_size=info.vocab_size,
        draft_kind=info.kind.value,
        max_context_len=info.max_context_len,
        max_draft_tokens=config.max_draft_tokens,
        max_sequences=config.max_sequences,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        device=info.device,
        dtype=info.dtype,
        version=importlib.metadata.version("outrider"),
    )


def prepare_cpu(config: DraftConfig) -> None:
    """Pins the process and bounds torch's threads."""
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)
    if config.threads:
        torch.set_num_threads(config.threads)
