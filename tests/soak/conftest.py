"""Stacks of tiny models: every process real, each answer long enough to be disturbed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig

from tests.soak.faults import able_to_hang

CONTEXT = 4096


@pytest.fixture(scope="session")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context, for long answers."""
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "long-tiny", max_context_len=CONTEXT)


@pytest.fixture(scope="module")
def hanging_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Once it is there, a step of a target does not return."""
    return tmp_path_factory.mktemp("hang") / "hang"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(long_tiny: Path, tmp_path_factory: pytest.TempPathFactory, hanging_file: Path) -> AsyncIterator[Stack]:
    """Two targets and a draft that is the target itself: its guesses are good."""
    config = StackConfig(
        target_model=str(long_tiny),
        draft_model=str(long_tiny),
        targets=2,
        target_args=f"--dtype float32 --kv-cache-bytes {64 << 20}",
        draft_args=f"--dtype float32 --kv-cache-bytes {64 << 20}",
        run_dir=tmp_path_factory.mktemp("run"),
    )
    async with Stack(config, amend=partial(able_to_hang, hanging_file)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(stack: Stack) -> AsyncIterator[Gateway]:
    async with Gateway(stack.gateway_grpc) as connected:
        yield connected
