"""The real model and the draft shipped for it, on a whole stack started once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig


# Of the package, not of the session: while other tests run it would still take processor time.
@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    # Room for one text of the model's whole context: more is zeroed at the start, and never used.
    config = StackConfig(run_dir=tmp_path_factory.mktemp("run"), trace_tokens=True, target_args="--num-blocks 640")
    async with Stack(config) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(stack: Stack) -> AsyncIterator[Gateway]:
    async with Gateway(stack.gateway_grpc) as connected:
        yield connected
