"""10,000 malformed requests of each kind to a gateway process: none is its fault, and they leave no memory behind."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.gateway.malformed import (
    Ends,
    answer_anything,
    bad_ends,
    grpc_messages,
    http_bodies,
    http_requests,
)
from tests.integration.gateway.scripted_router import ScriptedRouter, routing
from tests.integration.gateway.test_process import process

NUM = 10_000
WARM_UP = 15_000
"""Sent before memory is looked at: pools and caches fill."""
GROWTH_BYTES = 1 << 20
"""Allowed for each `NUM`."""
MAX_LOG_BYTES = 1 << 20
# For heads and bodies that never come to their end.
SOON = ("--header-timeout", "0.2", "--idle-timeout", "0.2", "--body-timeout", "0.2")
Send = Callable[[str, int, int], Awaitable[Ends]]


@asynccontextmanager
async def gateway(tiny: Path, *limits: str) -> AsyncIterator[tuple[Process, str, str]]:
    """The process, and its addresses for gRPC and HTTP."""
    router = ScriptedRouter(answer_anything)
    async with routing(router) as address:
        options = ("--router", address, "--max-body-bytes", str(1 << 20))
        async with process(
            "--listen-http", "127.0.0.1:0", *options, *limits, module="tests.soak.unpaced_gateway"
        ) as child:
            assert child.stderr is not None
            message = ""
            while not message.startswith("serving gRPC on"):
                message = json.loads(await child.stderr.readline())["message"]
            words = message.split()
            yield child, words[3].removesuffix(","), words[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("send", [http_bodies, http_requests, grpc_messages])
async def test_malformed_requests_are_refused_and_forgotten(tiny: Path, send: Send) -> None:
    async with gateway(tiny, *(SOON if send is http_requests else ())) as (child, grpc_address, http_address):
        assert child.stderr is not None
        log = asyncio.create_task(child.stderr.read())
        address = grpc_address if send is grpc_messages else http_address
        memory = psutil.Process(child.pid)
        ends: Ends = Counter()
        ends += await send(address, WARM_UP, 0)
        before = memory.memory_info().rss
        ends += await send(address, 2 * NUM, 1)
        grown = memory.memory_info().rss - before
        print(f"\n{dict(ends)}\ngrown by {grown / 1024:.0f} KiB from {before / 1024:.0f}")
        assert child.returncode is None
        child.terminate()
        assert len(await log) < MAX_LOG_BYTES
        assert await child.wait() == 0
    assert not bad_ends(ends)
    assert grown < 2 * GROWTH_BYTES
