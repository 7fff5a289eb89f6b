"""One target worker process: loads the model and builds the service."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry

from outrider.drafting.pool import no_leases
from outrider.drafting.source import DraftSource, make_sources
from outrider.engine import (
    CheckpointError,
    Engine,
    ModelInfo,
    resolve,
    revision,
    tokenizer_fingerprint,
)
from outrider.engine.backends.cpu import start_helpers
from outrider.engine.checkpoints.fetching import directory
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.engine.loading.loader import load_engine
from outrider.protocol.tokenizers import sha256_of
from outrider.rpc.access.roles import Role, credential
from outrider.rpc.channel import connect_to
from outrider.rpc.server import STOP_SIGNALS
from outrider.rpc.v1 import target_pb2, target_pb2_grpc, worker_pb2
from outrider.target.config import TargetConfig
from outrider.target.drafts.head import head_drafts, head_features, tried_head
from outrider.target.grammars.grammar import GrammarCompiler, host_bytes
from outrider.target.grammars.tokenizer import read_tokenizer
from outrider.target.metrics import TargetMetrics, runs_native_kernels
from outrider.target.requests.limits import Limits
from outrider.target.samples import Servicer, obedient, recorder_of
from outrider.target.service import TargetServicer
from outrider.target.step.own_engine import OwnEngine
from outrider.target.step.port import EnginePort
from outrider.target.step.scheduler import Batching
from outrider.target.step.worker import TargetWorker
from outrider.worker import process
from outrider.worker.process import RunningWorker, limit_cpu, serve_until_stopped
from outrider.worker.service import PrefixListener

if TYPE_CHECKING:
    from outrider.metadata.store import MetadataStore

log = logging.getLogger(__name__)

_USEFUL_TOKENS = 256
"""A prompt of a few sentences with its chat template, and as long an answer."""
SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


async def run(config: TargetConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises CheckpointError, or OSError when it cannot listen."""
    started_s = time.monotonic()
    spare_cores = place_threads(config)
    # Loading blocks for seconds; the event loop has nothing to do meanwhile.
    engine, info = load(config)
    log.info("loaded %s in %.1f s", info.model, time.monotonic() - started_s)
    await serve_until_stopped(serve(config, engine, info, spare_cores, signals=STOP_SIGNALS), info, config)


def place_threads(config: TargetConfig) -> set[int]:
    """Places the threads of every step on the process's cores, and those for prefill only on the others, if there are
    any. Returns the others."""
    allowed = os.sched_getaffinity(0)
    limit_cpu(config)
    own = os.sched_getaffinity(0)
    others = allowed - own
    if others and config.engine.prefill_threads > torch.get_num_threads():
        variant = config.engine.native_variant
        # In this order: every step uses the first threads.
        start_helpers(torch.get_num_threads() - 1, variant)
        os.sched_setaffinity(0, others)
        start_helpers(config.engine.prefill_threads - 1, variant)
        os.sched_setaffinity(0, own)
    return others


def load(config: TargetConfig) -> tuple[Engine, worker_pb2.WorkerInfo]:
    """The engine and this worker's WorkerInfo. Raises CheckpointError."""
    path = resolve(config.model, log.info)
    engine = load_engine(path, config.engine, host_bytes=host_bytes(path, config.grammar_bytes))
    info = process.describe(
        config,
        worker_pb2.WORKER_ROLE_TARGET,
        replace(engine.info, max_context_len=longest_sequence(engine.info)),
        model_revision=revision(path, engine.info, config.engine.quantization),
        tokenizer_fingerprint=tokenizer_fingerprint(path),
        tokenizer_sha256=sha256_of(read_tokenizer(path)),
        max_draft_tokens=config.max_draft_tokens,
        head=config.remote_head,
    )
    return engine, info


def longest_sequence(model: ModelInfo) -> int:
    """Tokens of the longest sequence, prompt included: what the KV cache holds of the model's context.

    Raises CheckpointError when that is no useful request.
    """
    held = model.num_blocks * model.block_size
    if held < min(_USEFUL_TOKENS, model.max_context_len):
        message = f"the KV cache holds {held} tokens, fewer than the {_USEFUL_TOKENS} of a short request"
        raise CheckpointError("kv_cache_bytes", f"{message}; raise it, or num_blocks")
    if held < model.max_context_len:
        log.warning("requests have at most %d tokens of the model's %d: the KV cache", held, model.max_context_len)
    return min(held, model.max_context_len)


def serve(
    config: TargetConfig,
    engine: Engine,
    info: worker_pb2.WorkerInfo,
    spare_cores: Collection[int] = (),
    *,
    signals: Sequence[signal.Signals] = (),
) -> AbstractAsyncContextManager[RunningWorker[TargetServicer]]:
    """Within the block the worker serves, and holds a lease if there is a metadata store. `spare_cores`: for what no
    step waits for."""
    make = partial(_servicer, config, engine, info, spare_cores)
    add = target_pb2_grpc.add_TargetServiceServicer_to_server
    notes = _notes(engine.info)
    return process.serve(config, info, SERVICE, make, add, signals=signals, devices=[info.device], notes=notes)


def _head(config: TargetConfig, engine: Engine) -> list[DraftSource]:
    if not (name := config.head or config.remote_head):
        return []
    model = resolve(config.model)
    prompt = load_tokenizer(model).encode("Once upon a time", add_special_tokens=True)
    head = tried_head(engine, model, directory(name), prompt)
    if config.head:
        return [head_drafts(engine, head, config.head_tokens)]
    return [head_features(engine, head, config.feature_bits)]


def _notes(model: ModelInfo) -> dict[str, str]:
    if model.device != "cpu" or runs_native_kernels(model.execution):
        return {}
    return {"kernels": f"no native kernels; steps run as {model.execution}, several times slower"}


def _servicer(
    config: TargetConfig,
    engine: Engine,
    info: worker_pb2.WorkerInfo,
    spare_cores: Collection[int],
    registry: CollectorRegistry,
    tell_prefix: PrefixListener,
    store: MetadataStore | None,
) -> AbstractAsyncContextManager[TargetServicer]:
    grammars = GrammarCompiler(
        resolve(config.model),
        info.vocab_size,
        engine.info.eos_token_ids,
        most_bytes=config.grammar_bytes,
        compile_cores=spare_cores,
    )
    own = OwnEngine(engine, Batching(info.block_size, config.engine.max_batch_tokens))
    limits, heads, execution = limits_of(config, info, grammars), _head(config, engine), engine.info.execution
    return servicer_of(
        config, info, own, limits, heads, registry, tell_prefix, store, kind=TargetServicer, execution=execution
    )


def limits_of(config: TargetConfig, info: worker_pb2.WorkerInfo, grammars: GrammarCompiler) -> Limits:
    return Limits(
        vocab_size=info.vocab_size,
        max_context_len=info.max_context_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_sequences=config.max_sequences,
        max_draft_tokens=config.max_draft_tokens,
        samples=bool(config.samples),
        grammars=grammars,
    )


def servicer_of(
    config: TargetConfig,
    info: worker_pb2.WorkerInfo,
    engine: EnginePort[Any],
    limits: Limits,
    heads: Sequence[DraftSource],
    registry: CollectorRegistry,
    tell_prefix: PrefixListener,
    store: MetadataStore | None,
    *,
    kind: Callable[..., Servicer],
    execution: str = "",
) -> AbstractAsyncContextManager[Servicer]:
    """The service of a target on any engine. `execution`: as TargetMetrics."""
    sources = [*heads, *make_sources(config.lookup_names)]
    samples = recorder_of(config.sample_store, info.model_revision)
    worker = TargetWorker(engine, limits, time.monotonic, sources, samples)
    servicer = kind(
        worker,
        info,
        limits,
        tell_prefix,
        TargetMetrics(registry, info, worker.stats, execution),
        connect=connect_to(Role.DRAFT, config.tls),
        tokenizer=read_tokenizer(resolve(config.model)),
        credential=credential(config.secret, Role.TARGET),
        read_leases=partial(store.workers, worker_pb2.WORKER_ROLE_DRAFT) if store is not None else no_leases,
    )
    return obedient(servicer, samples, store)
