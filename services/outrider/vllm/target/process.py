"""One target worker process on vLLM: loads the model and builds the service."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.loggers import PrometheusStatLogger

from outrider.checkpoint_files import end_tokens
from outrider.engine import ModelInfo, resolve, tokenizer_fingerprint, weights_revision
from outrider.heads import HeadFeatures
from outrider.metadata.store import MetadataStore
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.protocol.tokenizers import sha256_of
from outrider.rpc.server import STOP_SIGNALS
from outrider.rpc.v1 import sequence_pb2, target_pb2, target_pb2_grpc, worker_pb2
from outrider.target.config import TargetConfig
from outrider.target.grammars.grammar import GrammarCompiler
from outrider.target.grammars.tokenizer import read_tokenizer
from outrider.target.process import SERVICE, limits_of, servicer_of
from outrider.target.requests.events import Event
from outrider.target.service import TargetServicer
from outrider.telemetry.vllm_names import VLLM_NAMES
from outrider.vllm import versions
from outrider.vllm.target.engine import engine_args, info_of, make_core
from outrider.vllm.target.machine import VllmEngine
from outrider.worker import process
from outrider.worker.events import Opened
from outrider.worker.process import limit_cpu, serve_until_stopped
from outrider.worker.service import PrefixListener
from outrider.worker.watchdog import EXIT_BROKEN

log = logging.getLogger(__name__)

_REPORT_S = 0.5
"""Time in which the sequences of a broken engine are returned to their routers."""


class VllmServicer(TargetServicer):
    """A target's service. vLLM draws by its own noise, with the seed that the router has given: a text never depends on
    the drafts, as in coupled mode, and draft workers propose the likeliest tokens."""

    def _events_of(self, stream: int, request: target_pb2.VerifyRequest) -> Iterable[Event]:
        for opening in request.opens:
            if opening.mode == sequence_pb2.VERIFICATION_MODE_RATIO:
                opening.mode = sequence_pb2.VERIFICATION_MODE_COUPLED
        return super()._events_of(stream, request)

    def _for_drafts(self, events: Sequence[Event]) -> Sequence[Event]:
        return [_likeliest(event) if isinstance(event, Opened) else event for event in events]


def _likeliest(event: Opened) -> Opened:
    spec = replace(event.spec, params=SamplingParams(temperature=0.0), mode=VerificationMode.GREEDY)
    return replace(event, spec=spec)


async def run(config: TargetConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises CheckpointError, ValueError for an option that vLLM cannot
    take, or OSError when it cannot listen."""
    _limit_cpu(config)
    # Of a model's processes when one of them has died: the others may hang, and the sequences wait for them.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    started_s = time.monotonic()
    core, version = load(config)
    info = describe(config, info_of(core, version))
    log.info("loaded %s on vLLM %s in %.1f s", info.model, version, time.monotonic() - started_s)
    make = partial(_servicer, config, core, info)
    add = target_pb2_grpc.add_TargetServiceServicer_to_server
    try:
        worker = process.serve(config, info, SERVICE, make, add, signals=STOP_SIGNALS)
        await serve_until_stopped(worker, info, config)
    finally:
        core.shutdown()


def _limit_cpu(config: TargetConfig) -> None:
    limit_cpu(config)
    if config.threads:
        # Of each of vLLM's processes for CPUs, which inherit the cores of this one.
        os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def load(config: TargetConfig) -> tuple[EngineCore, str]:
    """The engine, and vLLM's version. Raises UnsupportedVersion, CheckpointError or ValueError."""
    version = versions.check()
    path = resolve(config.model, log.info)
    return make_core(engine_args(config, path), end_soon), version


def describe(config: TargetConfig, model: ModelInfo) -> worker_pb2.WorkerInfo:
    path = resolve(config.model)
    return process.describe(
        config,
        worker_pb2.WORKER_ROLE_TARGET,
        model,
        model_revision=f"{weights_revision(path)}/{model.execution}",
        tokenizer_fingerprint=tokenizer_fingerprint(path),
        tokenizer_sha256=sha256_of(read_tokenizer(path)),
        engine="vllm",
        max_draft_tokens=config.max_draft_tokens,
        head=config.remote_head,
    )


def end_soon(end: Callable[[int], Any] = os._exit) -> None:
    """Ends the process, after the time in which its sequences are returned. A broken engine cannot be used again, and
    what supervises the process starts it anew."""
    log.error("vLLM's engine has failed: this worker ends")
    threading.Timer(_REPORT_S, lambda: end(EXIT_BROKEN)).start()


def _servicer(
    config: TargetConfig,
    core: EngineCore,
    info: worker_pb2.WorkerInfo,
    registry: CollectorRegistry,
    tell_prefix: PrefixListener,
    store: MetadataStore | None,
) -> AbstractAsyncContextManager[VllmServicer]:
    path = resolve(config.model)
    grammars = GrammarCompiler(
        path, info.vocab_size, end_tokens(path), most_bytes=config.grammar_bytes, masks_on_threads=False
    )
    # vLLM keeps one block for itself.
    limits = replace(limits_of(config, info, grammars), num_blocks=info.num_blocks - 1)
    heads = [HeadFeatures("head", (), bits=config.feature_bits)] if config.remote_head else []
    engine = VllmEngine(core, end_soon)
    registry.register(VllmMetrics(core.vllm_config, engine))
    return servicer_of(config, info, engine, limits, heads, registry, tell_prefix, store, kind=VllmServicer)


_PREFIX = "vllm:"


class VllmMetrics(Collector):
    """What vLLM's scheduler says of itself: its metrics lie in the registry of the process.

    Those that every target reports under vLLM's names are left out, for they would appear twice.
    """

    def __init__(self, config: VllmConfig, engine: VllmEngine) -> None:
        self._logger = PrometheusStatLogger(config)
        self._engine = engine
        self._taken = frozenset(name for names in VLLM_NAMES.values() for name in names)

    def collect(self) -> Iterator[Metric]:
        if (stats := self._engine.scheduler_stats) is not None:
            self._engine.scheduler_stats = None
            self._logger.record(stats, None)
        for metric in REGISTRY.collect():
            if metric.name.startswith(_PREFIX) and metric.name not in self._taken:
                yield metric
