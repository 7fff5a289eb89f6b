"""A gateway on loopback before scripted routers, and clients of both its ports.

A test asks for the clients that it needs. It, or its module, may have a `router`, `template` or `options` of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from outrider.gateway import server
from outrider.gateway.config import Failover, GatewayConfig
from outrider.gateway.server import RunningGateway
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tokenizer.text import Detokeniser
from outrider.metadata import MetadataStore
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import generation_pb2_grpc, router_pb2, sequence_pb2, tenants_pb2
from outrider.target.grammars.tokenizer import read_tokenizer

from tests.integration.gateway.scripted_router import EOS, ScriptedRouter, routing, saying, tiny_tokenizer_bytes

OpenGateway = Callable[..., AbstractAsyncContextManager[RunningGateway]]
Says = Callable[..., None]
Stub = generation_pb2_grpc.GenerationServiceStub


def prompt_of(request: router_pb2.RouteRequest, tokenizer: ModelTokenizer) -> str:
    detokeniser = Detokeniser(tokenizer.token_bytes)
    return "".join(map(detokeniser.push, request.prompt_token_ids))


def events_of(text: str) -> list[str]:
    """The data of each event of a stream, without [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line for line in lines if line != "[DONE]"]


async def add_key(store: MetadataStore, key: str, tenant: str = "acme", **fields: Any) -> None:
    """The digest of the key is stored; it may infer, if `scopes` do not say otherwise."""
    given = {"scopes": [tenants_pb2.KEY_SCOPE_INFER], **fields}
    digest = hashlib.sha256(key.encode()).digest()
    await store.tenants.add_key(tenants_pb2.ApiKey(id=f"key-{key}", tenant=tenant, digest=digest, **given), by="test")


def installed(directory: Path, package: str) -> Path:
    """Where the programs of a package of npm are, once it is installed in the directory."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(directory), package]
    subprocess.run(install, check=True, timeout=400, stdout=DEVNULL)
    return directory / "node_modules" / ".bin"


async def output_of(*command: str, cwd: Path, env: dict[str, str]) -> str:
    """What a program says, which has to succeed."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> ModelTokenizer:
    return ModelTokenizer.parse(read_tokenizer(tiny))


@pytest.fixture
def gateway() -> OpenGateway:
    """Opens a gateway: `async with gateway(router_address, ...)`."""

    @asynccontextmanager
    async def opened(*routers: str, **options: Any) -> AsyncIterator[RunningGateway]:
        soon = {"failover": Failover(window_s=3.0), "drain_timeout_s": 5.0}
        config = GatewayConfig(
            listen_grpc="127.0.0.1:0", listen_http="127.0.0.1:0", routers=routers, **(soon | options)
        )
        async with server.running(config) as started:
            yield started

    return opened


@pytest.fixture
def template() -> str:
    """The model's chat template, if it has another than the tiny checkpoint."""
    return ""


@pytest.fixture
def router(template: str) -> ScriptedRouter:
    return ScriptedRouter(saying([40, 41, EOS]), max_context_len=4096, tokenizer=tiny_tokenizer_bytes(template))


@pytest.fixture
def says(router: ScriptedRouter, tokenizer: ModelTokenizer) -> Says:
    """Has the model answer with a text: `says("Yes.")`. `cut`: it ends there for its length."""

    def say(text: str, *, size: int = 3, cut: bool = False) -> None:
        ids = tokenizer.encode(text)
        finish = sequence_pb2.FINISH_REASON_LENGTH if cut else sequence_pb2.FINISH_REASON_STOP
        router.script = saying(ids if cut else [*ids, EOS], size=size, finish=finish)

    return say


@pytest.fixture
def options() -> dict[str, Any]:
    """What the gateway is opened with."""
    return {}


@pytest.fixture
async def running(
    gateway: OpenGateway, router: ScriptedRouter, options: dict[str, Any]
) -> AsyncIterator[RunningGateway]:
    """A gateway before `router`."""
    async with routing(router) as address, gateway(address, **options) as started:
        yield started


@pytest.fixture
async def http(running: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{running.http_address}", timeout=60) as client:
        yield client


@pytest.fixture
async def client(running: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://{running.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def stub(running: RunningGateway) -> AsyncIterator[Stub]:
    async with create_channel(running.grpc_address) as channel:
        yield Stub(channel)
