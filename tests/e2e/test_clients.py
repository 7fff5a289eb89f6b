"""Stock clients, unchanged and each in an environment of its own, in sessions of three turns with tools, before a
gateway whose model is scripted: it asks a tool where the question names a city, and says what the tool found."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from outrider.gateway.config import Failover, GatewayConfig
from outrider.gateway.server import running
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import router_pb2

from tests.e2e.clients.common import ANSWERS
from tests.integration.gateway.conftest import prompt_of
from tests.integration.gateway.scripted_router import EOS, MODEL, ScriptedRouter, routing, saying, tiny_tokenizer_bytes

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
# Each in an environment of its own, as some cannot be installed together.
PACKAGES = {
    "openai": ("openai>=2,<4",),
    "anthropic": ("anthropic>=1,<3",),
    "langchain": ("langchain-openai>=1,<2",),
    # Its bridges import what only its proxy asks for.
    "litellm": ("litellm[proxy]>=1.80,<2",),
    "instructor": ("instructor>=1.10,<2",),
    "pydantic_ai": ("pydantic-ai-slim[openai]>=1,<3",),
    "openai_agents": ("openai-agents>=0.4,<1",),
    "llama_index": ("llama-index-llms-openai-like>=0.5,<2",),
}


def interpreter(client: str) -> Path:
    """That of the client's environment, which is kept for the next run."""
    directory, packages = ROOT / "build" / "clients" / client, repr(PACKAGES[client])
    done, found = directory / "installed.txt", directory / "bin" / "python"
    if not done.exists() or done.read_text() != packages:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True, timeout=120)
        pip = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        installed = subprocess.run([*pip, *PACKAGES[client]], check=False, timeout=900, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"{client} cannot be installed: {installed.stderr.strip()[-300:]}")
        done.write_text(packages)
    return found


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
    await program(client, url, MODEL)


async def program(client: str, url: str, model: str) -> None:
    """Runs one of `tests.e2e.clients`. LiteLLM would look for prices in the network."""
    python = await asyncio.to_thread(interpreter, client)
    arguments = [str(python), "-m", f"tests.e2e.clients.{client}_client", url, model]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, env=environment, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]
