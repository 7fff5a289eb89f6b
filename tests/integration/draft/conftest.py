"""A draft worker in this process, served on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from outrider.draft.config import DraftConfig
from outrider.draft.process import describe, serve
from outrider.draft.service import DraftServicer
from outrider.drafters import ModelConfig, load_drafter
from outrider.engine import EngineConfig
from outrider.rpc.channel import create_channel
from outrider.rpc.v1.draft_pb2_grpc import DraftServiceStub

Served = tuple[DraftServiceStub, DraftServicer]
Serve = Callable[..., AbstractAsyncContextManager[Served]]


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 60) -> None:
    """Waits for what another thread or process brings about."""
    async with asyncio.timeout(timeout_s):
        # Polled: a test has nothing it could be notified by.
        while not (await held if isinstance(held := condition(), Awaitable) else held):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def served(tiny: Path) -> Serve:
    """Loads a drafter on the tiny model, serves it, and connects to it."""

    @asynccontextmanager
    async def start(**config: object) -> AsyncIterator[Served]:
        engine = EngineConfig(dtype="bfloat16", num_blocks=64)
        drafter = load_drafter(tiny, engine=engine, model=ModelConfig(min_confidence=0.0))
        settings = DraftConfig(str(tiny), "127.0.0.1:0", **config)  # type: ignore[arg-type]
        async with (
            serve(settings, drafter, describe(settings, tiny, drafter)) as running,
            create_channel(running.life.address) as channel,
        ):
            yield DraftServiceStub(channel), running.servicer

    return start
