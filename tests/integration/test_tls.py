"""Every process of a cluster with certificates, or a secret: requests go through, and each port keeps others out."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc
import httpx
import pytest
from outrider.draft.config import DraftConfig
from outrider.draft.process import describe
from outrider.draft.process import serve as serve_draft
from outrider.drafters.loading import load_drafter
from outrider.engine import EngineConfig
from outrider.gateway.config import GatewayConfig
from outrider.gateway.server import RunningGateway, running
from outrider.metadata import MetadataStore
from outrider.rpc.access.roles import ClusterSecret, Role, credential
from outrider.rpc.channel import connect_to, create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc
from outrider.target.config import TargetConfig
from outrider.target.process import load
from outrider.target.process import serve as serve_target
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.clusters import contexts
from outrider_controller.cli.clusters import named as clusters
from outrider_controller.cli.clusters.control import list_models, list_workers
from outrider_controller.cli.exits import CommandError
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.process import running_router

from tests.certificates import Cluster
from tests.redis_server import EmbeddedServer

_ENGINE = EngineConfig(dtype="float32", num_blocks=256)


@dataclass(frozen=True, slots=True)
class Running:
    cluster: Cluster
    gateway: RunningGateway
    addresses: dict[Role, str]
    authority: Path


@asynccontextmanager
async def everything(directory: Path, tiny: Path, secret: ClusterSecret | None = None) -> AsyncIterator[Running]:
    """With certificates, or with `secret` instead."""
    cluster = Cluster(directory / "tls")
    tls = {role: "" if secret else str(cluster.files(role).directory) for role in Role}
    public = cluster.issue("public", "127.0.0.1")
    common: dict[str, Any] = {"model": str(tiny), "listen": "127.0.0.1:0", "engine": _ENGINE, "secret": secret}
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedServer.start(directory / "redis"))
        store = await stack.enter_async_context(MetadataStore.connect(redis.url))
        common["metadata_url"] = redis.url
        draft_config = DraftConfig(**common, tls_dir=tls[Role.DRAFT])
        drafter = load_drafter(tiny, engine=_ENGINE, model=draft_config.drafting)
        info = describe(draft_config, tiny, drafter)
        draft = await stack.enter_async_context(serve_draft(draft_config, drafter, info))
        target_config = TargetConfig(**common, model_name="tiny", tls_dir=tls[Role.TARGET])
        target = await stack.enter_async_context(serve_target(target_config, *load(target_config)))
        router_config = RouterConfig(tls_dir=tls[Role.ROUTER], secret=secret)
        control_config = ControlConfig(tls_dir=tls[Role.CONTROL], secret=secret)
        router = await stack.enter_async_context(running_router(router_config, store))
        control = await stack.enter_async_context(running_control(control_config, store))
        gateway_config = GatewayConfig(
            listen_grpc="127.0.0.1:0",
            listen_http="127.0.0.1:0",
            metadata_url=redis.url,
            tls_dir=tls[Role.GATEWAY],
            public_tls_dir=str(public.directory),
            secret=secret,
        )
        gateway = await stack.enter_async_context(running(gateway_config))
        addresses = {
            Role.TARGET: target.life.address,
            Role.DRAFT: draft.life.address,
            Role.ROUTER: router.address,
            Role.CONTROL: control.address,
        }
        yield Running(cluster, gateway, addresses, public.authority)


async def test_a_cluster_with_certificates_answers_with_drafts_and_lets_nobody_else_in(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with everything(tmp_path, tiny) as cluster:
        answers = [await ask(cluster) for _ in range(3)]
        async with asyncio.timeout(60):
            # On a busy machine the first drafts come too late to count.
            while not any(answer.metrics.speculative_decoding.num_draft_tokens for answer in answers):
                answers.append(await ask(cluster))
        assert len({answer.text for answer in answers}) == 1
        trusting = ssl.create_default_context(cafile=cluster.authority)
        async with httpx.AsyncClient(verify=trusting) as http:
            listed = await http.get(f"https://{cluster.gateway.http_address}/v1/models")
            assert [model["id"] for model in listed.json()["data"]] == ["tiny"]
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://{cluster.gateway.http_address}/v1/models")
        for role, address in cluster.addresses.items():
            method = METHODS[role]
            strangers = cluster.cluster.files(Role.DRAFT)
            assert await refused(connect_to(role, strangers)(address), method) == "PERMISSION_DENIED"
            assert await refused(create_channel(address), method) == "UNAVAILABLE"
        for unfit in (cluster.cluster.expired(Role.OPERATOR), cluster.cluster.of_another_authority(Role.OPERATOR)):
            monkeypatch.setenv("OUTRIDER_TLS_DIR", str(unfit.directory))
            with pytest.raises(CommandError, match="hangs up: TLS or certificates do not fit"):
                await list_workers(cluster.addresses[Role.CONTROL])
        # As an operator's commands ask.
        monkeypatch.setenv("OUTRIDER_TLS_DIR", str(cluster.cluster.files(Role.OPERATOR).directory))
        monkeypatch.setenv("OUTRIDER_GATEWAY_CA", str(cluster.authority))
        assert len((await list_workers(cluster.addresses[Role.CONTROL])).workers) == 5
        assert [model.model for model in await list_models(cluster.addresses[Role.ROUTER])] == ["tiny"]
        async with Gateway(cluster.gateway.grpc_address) as gateway:
            request = generation_pb2.GenerateRequest(model="tiny", text="ab")
            assert (await gateway.answer(request)).finish_reason
        # And as those that ask a cluster by name.
        monkeypatch.delenv("OUTRIDER_TLS_DIR")
        monkeypatch.delenv("OUTRIDER_GATEWAY_CA")
        monkeypatch.setenv("OUTRIDER_CONTEXTS_FILE", str(tmp_path / "config" / "config.yaml"))
        control, tls = cluster.addresses[Role.CONTROL], str(cluster.cluster.files(Role.OPERATOR).directory)
        with clusters.changed() as known:
            known.named["prod"] = clusters.Context(
                "prod", control, cluster.gateway.grpc_address, tls_dir=tls, gateway_ca=str(cluster.authority)
            )
        with click.Context(click.Command("any")) as context:
            contexts.want(context, "prod")
            assert len((await list_workers(control)).workers) == 5
            async with Gateway(cluster.gateway.grpc_address) as gateway:
                assert (await gateway.answer(request)).finish_reason


async def test_with_a_secret_alone_drafts_serve_targets_and_targets_routers_and_each_refuses_the_others(
    tmp_path: Path, tiny: Path
) -> None:
    secret = ClusterSecret(b"sixteen bytes and more")
    async with everything(tmp_path, tiny, secret) as cluster:
        answers = [await ask(cluster)]
        async with asyncio.timeout(60):
            while not any(answer.metrics.speculative_decoding.num_draft_tokens for answer in answers):
                answers.append(await ask(cluster))
        for role, caller in ((Role.TARGET, Role.GATEWAY), (Role.DRAFT, Role.ROUTER)):
            address, method = cluster.addresses[role], METHODS[role]
            assert await refused(create_channel(address), method) == "UNAUTHENTICATED"
            assert await refused(create_channel(address), method, credential(secret, caller)) == "PERMISSION_DENIED"


METHODS = {
    Role.TARGET: "/outrider.rpc.v1.TargetService/GetInfo",
    Role.DRAFT: "/outrider.rpc.v1.DraftService/GetInfo",
    Role.ROUTER: "/outrider.rpc.v1.RouterService/ListModels",
    Role.CONTROL: "/outrider.rpc.v1.ControlService/ListWorkers",
}


async def ask(cluster: Running) -> generation_pb2.GenerateResponse:
    trusting = grpc.ssl_channel_credentials(cluster.authority.read_bytes())
    async with grpc.aio.secure_channel(cluster.gateway.grpc_address, trusting) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        options = generation_pb2.GenerationOptions(max_tokens=100, temperature=0, include_metrics=True)
        request = generation_pb2.GenerateRequest(model="tiny", text="ab ab ab ab", options=options)
        return await stub.Generate(request, timeout=60)


async def refused(channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...] = ()) -> str:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"", timeout=10, metadata=metadata)
    return from_rpc_error(caught.value).code.name
