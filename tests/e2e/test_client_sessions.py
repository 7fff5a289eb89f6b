"""Stock clients in sessions of three turns with tools, before a gateway whose model is scripted: it asks a tool where
the question names a city, and says what the tool found."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from outrider.gateway.config import Failover, GatewayConfig
from outrider.gateway.server import running
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import router_pb2

from tests.e2e.clients.sessions.common import ANSWERS
from tests.e2e.test_clients import PACKAGES, program
from tests.integration.gateway.scripted_router import EOS, MODEL, ScriptedRouter, routing, saying, tiny_tokenizer_bytes
from tests.integration.gateway.test_tools import prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]


def said(request: router_pb2.RouteRequest, tokenizer: ModelTokenizer) -> str:
    turn = prompt_of(request, tokenizer).rpartition("\nuser\n")[2]
    cities = re.findall("Bern|Rome", turn)
    if "Which city" in turn:
        # Only an object is asked for.
        return f'{{"city": "{cities[-1]}"}}'
    if not cities:
        return ANSWERS[2]
    if "<tool_response>" in turn:
        return f"It is sunny in {cities[-1]}."
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{cities[-1]}"}}}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def url() -> AsyncIterator[str]:
    known = tiny_tokenizer_bytes()
    tokenizer = ModelTokenizer.parse(known)

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        async for response in saying([*tokenizer.encode(said(request, tokenizer)), EOS], size=3)(request):
            yield response

    async with routing(ScriptedRouter(script, max_context_len=8192, tokenizer=known)) as address:
        config = GatewayConfig(
            listen_grpc="127.0.0.1:0", listen_http="127.0.0.1:0", routers=(address,), failover=Failover(window_s=3.0)
        )
        async with running(config) as gateway:
            yield f"http://{gateway.http_address}/v1"


@pytest.mark.parametrize("client", PACKAGES)
async def test_a_stock_client_has_a_session_of_three_turns_with_tools(client: str, url: str) -> None:
    await program(client, f"sessions.{client}_session", url, MODEL)
