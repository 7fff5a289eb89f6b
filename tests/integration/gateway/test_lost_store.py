"""A store that lost its data: who has known that keys are required keeps the door closed, and who cannot know it does
not open it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import redis
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.metadata import MetadataStore
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import control_process

from tests.integration.gateway.conftest import OpenGateway, add_key
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, routing, saying
from tests.redis_server import EmbeddedServer

OPEN, NO_KEY, UNKNOWN = 200, 401, 503
FRESH_S = 0.2


class Cluster:
    """Gateways and control planes on one store and one router."""

    def __init__(self, open_gateway: OpenGateway, router: str, url: str) -> None:
        self._open, self.router, self.url = open_gateway, router, url

    @asynccontextmanager
    async def gateway(self, file: str = "") -> AsyncIterator[str]:
        """Its HTTP address; it has never answered anybody."""
        async with self._open(self.router, metadata_url=self.url, keys_required_file=file) as running:
            yield running.http_address

    @asynccontextmanager
    async def control(self, file: str = "") -> AsyncIterator[str]:
        config = ControlConfig(metadata_url=self.url, ops_listen="", keys_required_file=file)
        async with control_process(config) as running:
            yield running.address

    def lose_everything(self) -> None:
        with redis.Redis.from_url(self.url) as raw:
            raw.flushall()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway believes what it read of a key for less long than the five seconds of every day."""
    monkeypatch.setattr("outrider.gateway.tenants.auth._FRESH_S", FRESH_S)


@pytest.fixture
async def cluster(gateway: OpenGateway, server: EmbeddedServer, tokenizer: ModelTokenizer) -> AsyncIterator[Cluster]:
    async with routing(ScriptedRouter(saying([*tokenizer.encode("Yes."), 2]))) as address:
        yield Cluster(gateway, address, server.url)


async def ask(address: str, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=f"http://{address}", headers=headers, timeout=60) as client:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 8}
        return (await client.post("/v1/completions", json=body)).status_code


async def settled(address: str) -> int:
    """What it answers a request without a key once it knows."""
    return await otherwise(address, UNKNOWN)


async def otherwise(address: str, than: int, key: str = "") -> int:
    async with asyncio.timeout(60):
        while (status := await ask(address, key)) == than:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return status


async def make_key(control: str) -> str:
    async with create_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        made = await stub.CreateKey(control_pb2.CreateKeyRequest(tenant="default"))
        return str(made.key)


async def test_a_gateway_that_has_seen_a_key_stays_closed_when_the_store_is_flushed(cluster: Cluster) -> None:
    async with cluster.control() as control, cluster.gateway() as gateway:
        assert await settled(gateway) == OPEN
        key = await make_key(control)
        assert await otherwise(gateway, OPEN) == NO_KEY
        assert await ask(gateway, key) == OPEN
        cluster.lose_everything()
        for _ in range(12):
            assert await ask(gateway) == NO_KEY
            await asyncio.sleep(FRESH_S / 4)
        # A store that takes its time leaves a known key valid for one more request.
        assert await otherwise(gateway, OPEN, key) == NO_KEY


async def test_a_gateway_that_starts_after_the_loss_learns_of_keys_from_the_control_plane(cluster: Cluster) -> None:
    async with cluster.control() as control:
        await make_key(control)
        cluster.lose_everything()
        async with cluster.gateway() as gateway:
            assert {await ask(gateway) for _ in range(20)} <= {NO_KEY, UNKNOWN}
            assert await settled(gateway) == NO_KEY


async def test_another_gateway_tells_it_where_no_control_plane_runs(cluster: Cluster) -> None:
    async with AsyncExitStack() as old:
        knowing = await old.enter_async_context(cluster.gateway())
        async with cluster.control() as control:
            await make_key(control)
        assert await ask(knowing) == NO_KEY
        cluster.lose_everything()
        async with cluster.gateway() as gateway:
            assert await ask(gateway) == UNKNOWN
            await asyncio.sleep(2 * FRESH_S)
            assert await ask(knowing) == NO_KEY
            assert await settled(gateway) == NO_KEY


async def test_on_a_store_without_data_nobody_is_answered_before_a_control_plane_has_used_it(cluster: Cluster) -> None:
    async with cluster.gateway() as gateway:
        assert await ask(gateway) == UNKNOWN
        async with cluster.control():
            assert await settled(gateway) == OPEN


@pytest.mark.parametrize("who", ["gateway", "control plane"])
async def test_what_is_in_the_file_holds_when_every_process_and_the_store_begin_anew(
    cluster: Cluster, tmp_path: Path, who: str
) -> None:
    file = str(tmp_path / "keys-required")
    of_gateway, of_control = (file, "") if who == "gateway" else ("", file)
    async with cluster.control(of_control) as control, cluster.gateway(of_gateway) as gateway:
        await make_key(control)
        assert await ask(gateway) == NO_KEY
    cluster.lose_everything()
    async with cluster.gateway(of_gateway) as gateway, cluster.control(of_control):
        assert {await ask(gateway) for _ in range(20)} <= {NO_KEY, UNKNOWN}
        assert await settled(gateway) == NO_KEY


async def test_grpc_is_as_closed_as_http(cluster: Cluster, gateway: OpenGateway) -> None:
    async with cluster.control() as control:
        await make_key(control)
    cluster.lose_everything()
    async with (
        gateway(cluster.router, metadata_url=cluster.url) as running,
        create_channel(running.grpc_address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(generation_pb2.GenerateRequest(model=MODEL, text="a"))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_keys_that_are_found_before_this_process_has_kept_anything_make_the_file(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    async with MetadataStore.connect(server.url) as store:
        await add_key(store, "k", "default")
    file = tmp_path / "keys-required"
    async with MetadataStore.connect(server.url, keys_required_file=str(file)) as later:
        await later.tenants.keep_required()
    assert file.exists()
