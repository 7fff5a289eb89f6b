"""LangChain, unchanged and in an environment of its own, before a gateway of ours."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import router_pb2

from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.scripted_router import EOS, MODEL, ScriptedRouter, routing, saying

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXT = "As you say."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CITY = '{"city": "Bern"}'


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("langchain")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, timeout=120)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "langchain-openai>=1,<2"], check=True, timeout=400)
    return directory / "bin" / "python"


async def test_tools_structured_output_and_streams_of_langchain(
    python: Path, gateway: OpenGateway, tokenizer: ModelTokenizer
) -> None:
    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        grammar = request.logits.grammar
        said = CALL if "tool_call" in grammar else CITY if grammar else TEXT
        async for response in saying([*tokenizer.encode(said), EOS], size=3)(request):
            yield response

    router = ScriptedRouter(script, max_context_len=4096)
    async with routing(router) as address, gateway(address) as running:
        client = Path(__file__).parent / "langchain_client.py"
        url = f"http://{running.http_address}/v1"
        process = await asyncio.create_subprocess_exec(str(python), str(client), url, MODEL, stdout=PIPE, stderr=PIPE)
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    call = ["weather", {"city": "Bern"}]
    assert json.loads(output) == {
        "called": [call],
        "streamed": [call],
        "after results": TEXT,
        "structured": ["Bern", "Bern"],
        "either": "weather",
        "text": TEXT,
        "stream": TEXT,
    }
