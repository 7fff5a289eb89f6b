"""A target on vLLM that serves on loopback, with the engine of this process, and a draft that says what it is told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.engine import EngineConfig
from outrider.metadata import LeaseRecord
from outrider.rpc.channel import create_channel
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import draft_pb2_grpc, target_pb2_grpc, worker_pb2
from outrider.target.config import TargetConfig
from outrider.target.process import SERVICE
from outrider.vllm.target.engine import info_of
from outrider.vllm.target.process import VllmServicer, _servicer, describe, load
from outrider.worker import process
from outrider.worker.process import RunningWorker

from tests.integration.target.test_server import Answer, ScriptedDraft

SMALL = "--kv-cache-memory-bytes=200000000 --no-async-scheduling"
"""Steps follow one another, so that a draft that is waited for is in the next one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine and what a worker says of it."""

    config: TargetConfig
    core: Any
    info: worker_pb2.WorkerInfo

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@contextlib.contextmanager
def loaded(model: str | Path, vllm_args: str = SMALL, **changes: Any) -> Iterator[Loaded]:
    engine: dict[str, Any] = {"dtype": "float32", "max_batch_tokens": 512, **changes.pop("engine", {})}
    options: dict[str, Any] = {"max_sequences": 40, "max_draft_tokens": 8, **changes}
    config = TargetConfig(
        model=str(model),
        listen="127.0.0.1:0",
        engine=EngineConfig(**engine),
        runs_on="vllm",
        vllm_args=vllm_args,
        **options,
    )
    core, version = load(config)
    # The price of a row is measured, and beside other tests it may be any: here all drafts are verified.
    core.scheduler.book.price_of = lambda cost: 0.0
    try:
        yield Loaded(config, core, describe(config, info_of(core, version)))
    finally:
        core.shutdown()


@contextlib.asynccontextmanager
async def running(
    engine: Loaded, **changes: Any
) -> AsyncIterator[tuple[RunningWorker[VllmServicer], target_pb2_grpc.TargetServiceAsyncStub]]:
    config = replace(engine.config, **changes)
    make = partial(_servicer, config, engine.core, engine.info)
    add = target_pb2_grpc.add_TargetServiceServicer_to_server
    async with (
        process.serve(config, engine.info, SERVICE, make, add) as worker,
        create_channel(worker.life.address) as channel,
    ):
        yield worker, target_pb2_grpc.TargetServiceStub(channel)


@contextlib.asynccontextmanager
async def served(
    engine: Loaded, answer: Answer | None = None, **changes: Any
) -> AsyncIterator[tuple[VllmServicer, target_pb2_grpc.TargetServiceAsyncStub, ScriptedDraft]]:
    draft, server = ScriptedDraft(answer), create_server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    async with serving(server, "127.0.0.1:0", services=[]) as life, running(engine, **changes) as (worker, stub):
        draft.address = life.address
        info = worker_pb2.WorkerInfo(worker_id="draft-1", features=engine.info.features)
        record = LeaseRecord(info, worker_pb2.WorkerLoad(), life.address, 1)

        async def leases() -> list[LeaseRecord]:
            return [record]

        worker.servicer.drafts.links._leases.read = leases
        yield worker.servicer, stub, draft
