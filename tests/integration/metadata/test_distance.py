"""Redis some way off: what keeps a fleet together works however long a round trip takes, up to a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from outrider.gateway.routers.routers import LeasedRouters
from outrider.metadata import MetadataStore
from outrider.rpc.v1 import worker_pb2
from outrider_controller.cli.up.ports import Ports

from benchmarks.support.delay_proxy import DelayProxy, set_round_trip
from tests.integration.metadata.conftest import eventually, ids, info
from tests.redis_server import EmbeddedServer

TARGET, ROUTER = worker_pb2.WORKER_ROLE_TARGET, worker_pb2.WORKER_ROLE_ROUTER
HASHES = [bytes([i]) * 16 for i in range(4)]


@asynccontextmanager
async def at_a_distance(server: EmbeddedServer, round_trip_ms: float) -> AsyncIterator[str]:
    """The URL of the same server, so far away."""
    ports = Ports()
    port, control = ports.claim(), ports.claim()
    proxy = asyncio.create_task(DelayProxy({port: str(server.socket_path)}).run(control))
    try:
        async with asyncio.timeout(60):
            while True:
                with suppress(OSError):
                    await set_round_trip(control, round_trip_ms)
                    break
                await asyncio.sleep(0.02)
        yield f"redis://127.0.0.1:{port}"
    finally:
        proxy.cancel()
        with suppress(asyncio.CancelledError):
            await proxy


@pytest.mark.parametrize("round_trip_ms", [1, 10, 50, 200])
async def test_all_workers_are_seen_at_once_and_the_connection_is_kept(
    server: EmbeddedServer, store: MetadataStore, round_trip_ms: float
) -> None:
    async with (
        at_a_distance(server, round_trip_ms) as url,
        MetadataStore.connect(url) as reader,
        store.register(info("t1"), "127.0.0.1:7001", worker_pb2.WorkerLoad),
        store.register(info("t2"), "127.0.0.1:7002", worker_pb2.WorkerLoad),
        store.register(info("r1", ROUTER), "127.0.0.1:7003", worker_pb2.WorkerLoad),
    ):
        for _ in range(3):
            assert sorted(await ids(reader)) == ["r1", "t1", "t2"]
        assert reader.counters.num_timeouts == 0
        assert await LeasedRouters(reader).addresses() == ["127.0.0.1:7003"]


async def test_what_a_request_cannot_wait_for_does_not_take_the_leases_with_it(
    server: EmbeddedServer, short_leases: float
) -> None:
    """A look for prefixes at every request, as a busy router does it, over a way that is too long for it."""
    async with (
        at_a_distance(server, 200) as url,
        MetadataStore.connect(url) as far,
        MetadataStore.connect(server.url) as near,
        far.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad),
    ):
        # Longer than a lease's term: without heartbeats it would be over.
        end_s = time.monotonic() + 1.3 * short_leases
        while time.monotonic() < end_s:
            assert await far.lookup_prefix(TARGET, HASHES, ["t1"]) == {}
            await asyncio.sleep(0.02)
        assert await ids(near) == ["t1"]
        assert await ids(far) == ["t1"]
        assert far.available
        # The others were answered at once.
        assert far.counters.num_timeouts < 20


async def test_requests_ask_again_once_the_way_is_short_enough(server: EmbeddedServer, store: MetadataStore) -> None:
    async with (
        at_a_distance(server, 20) as url,
        MetadataStore.connect(url) as reader,
        store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad),
    ):
        await store.publish_prefix(TARGET, "t1", HASHES)

        async def found() -> bool:
            return await reader.lookup_prefix(TARGET, HASHES, ["t1"]) == {"t1": 4}

        # The first look has to connect, which may take it longer than a request waits.
        await eventually(found)
        assert reader.available
