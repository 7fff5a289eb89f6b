"""One draft worker process: loads the drafter and builds the service."""

from __future__ import annotations

import hashlib
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from outrider.draft.config import DraftConfig
from outrider.draft.service import DraftMetrics, DraftServicer
from outrider.draft.wire import ProposalLimits
from outrider.draft.worker import DraftWorker
from outrider.drafters import Drafter, load_drafter
from outrider.drafters.adapters import owned_adapters
from outrider.drafters.model import SOURCE
from outrider.engine import resolve, tokenizer_fingerprint, weights_revision
from outrider.engine.checkpoints.fetching import directory
from outrider.engine.loading.draft_checkpoint import read_recipe
from outrider.engine.models.adapters import adapter_revision, is_adapter
from outrider.rpc.server import STOP_SIGNALS
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from outrider.worker import process
from outrider.worker.process import RunningWorker, limit_cpu, serve_until_stopped
from outrider.worker.service import PrefixListener

if TYPE_CHECKING:
    from outrider.metadata.store import MetadataStore

log = logging.getLogger(__name__)

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


def load(config: DraftConfig, path: Path) -> Drafter:
    """The drafter that `config` asks for, from the checkpoint at `path`."""
    adapters = owned_adapters(Path(config.adapters).expanduser()) if config.adapters else None
    for tenant, adapter in (adapters or {}).items():
        log.info("the adapter in %s drafts for %s", adapter, tenant)
    more = {"target": _target(config), "head": _head(config)}
    return load_drafter(path, engine=config.engine, model=config.drafting, adapters=adapters, **more)


def _head(config: DraftConfig) -> Path | None:
    return directory(config.head, log.info) if config.head else None


def _target(config: DraftConfig) -> Path | None:
    """The checkpoint whose tokens are proposed, if another than the draft's. Its weights need not be there."""
    return directory(config.target_model, log.info) if config.target_model else None


def _described(config: DraftConfig, path: Path) -> Path:
    """What the recipe is of: the adapter, if there is one."""
    own = Path(config.adapters).expanduser() if config.adapters else path
    return _head(config) or (own if is_adapter(own) else path)


async def run(config: DraftConfig, load: Callable[[DraftConfig, Path], Drafter] = load) -> None:
    """Serves until a stop signal, then drains. Raises CheckpointError or OSError when it cannot start."""
    limit_cpu(config)
    # Loading blocks for seconds; the event loop has nothing to do meanwhile.
    path = resolve(config.model, log.info)
    drafter = load(config, path)
    info = describe(config, path, drafter)
    await serve_until_stopped(serve(config, drafter, info, signals=STOP_SIGNALS), info, config)


def serve(
    config: DraftConfig,
    drafter: Drafter,
    info: worker_pb2.WorkerInfo,
    *,
    signals: Sequence[signal.Signals] = (),
) -> AbstractAsyncContextManager[RunningWorker[DraftServicer]]:
    """Within the block the worker serves, and holds a lease if there is a metadata store."""
    make = partial(_servicer, config, drafter, info)
    add = draft_pb2_grpc.add_DraftServiceServicer_to_server
    return process.serve(config, info, SERVICE, make, add, signals=signals, devices=[info.device])


def _servicer(
    config: DraftConfig,
    drafter: Drafter,
    info: worker_pb2.WorkerInfo,
    registry: CollectorRegistry,
    tell_prefix: PrefixListener,
    store: MetadataStore | None,
) -> DraftServicer:
    limits = ProposalLimits(info.max_context_len, config.max_draft_tokens)
    worker = DraftWorker(drafter, config.max_sequences)
    return DraftServicer(worker, info, limits, DraftMetrics(registry, info, worker.stats), tell_prefix)


def _revision(config: DraftConfig, path: Path) -> str:
    """With adapters it is another version of the draft."""
    found = weights_revision(_head(config) or path, config.engine.quantization, every=bool(config.head))
    if not config.adapters:
        return found
    owned = owned_adapters(Path(config.adapters).expanduser())
    every = [f"{tenant} {adapter_revision(adapter)}" for tenant, adapter in sorted(owned.items())]
    return f"{found}-{hashlib.sha256(repr(every).encode()).hexdigest()[:8]}"


def describe(config: DraftConfig, path: Path, drafter: Drafter) -> worker_pb2.WorkerInfo:
    """This worker's WorkerInfo, with a new id at every start."""
    return process.describe(
        config,
        worker_pb2.WORKER_ROLE_DRAFT,
        drafter.info,
        model_revision=_revision(config, path),
        head=config.head,
        tokenizer_fingerprint=tokenizer_fingerprint(_target(config) or path),
        draft_kind="head" if config.head else SOURCE,
        max_draft_tokens=config.max_draft_tokens,
        candidate=config.candidate,
        recipe=read_recipe(_described(config, path)),
    )
