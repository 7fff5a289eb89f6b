"""Codex as it is installed: its tools in namespaces and those that OpenAI runs; a session of the client itself."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import router_pb2

from tests.integration.gateway.conftest import OpenGateway, installed, output_of, prompt_of
from tests.integration.gateway.scripted_router import EOS, MODEL, ScriptedRouter, routing, saying

PARAMETERS = {"type": "object", "properties": {"target": {"type": "string"}}}
CLOSE = {"type": "function", "name": "close_agent", "strict": False, "parameters": PARAMETERS}
# As Codex 0.171 sends them.
TOOLS: Any = [
    {"type": "function", "name": "exec_command", "strict": False, "parameters": PARAMETERS},
    {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [CLOSE]},
    {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [CLOSE]},
    {"type": "web_search", "external_web_access": True},
]
SETTINGS = """
model = "{model}"
model_provider = "outrider"
model_context_window = 200000
[model_providers.outrider]
name = "outrider"
base_url = "{url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted(tokenizer: ModelTokenizer, *answers: str) -> ScriptedRouter:
    """Gives one answer after the other, and then the last one again."""
    left = list(answers)

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        said = left.pop(0) if len(left) > 1 else left[0]
        async for response in saying([*tokenizer.encode(said), EOS], size=7)(request):
            yield response

    return ScriptedRouter(script, max_context_len=400_000)


async def test_functions_of_namespaces_are_called_by_their_own_names_and_hosted_tools_are_named_as_left_out(
    gateway: OpenGateway, tokenizer: ModelTokenizer
) -> None:
    said = called("multi_agent_v1__close_agent", target="a") + called("mcp__files__close_agent", target="b")
    router = scripted(tokenizer, said, "Done.")
    async with routing(router) as address, gateway(address) as running:
        client = openai.AsyncOpenAI(base_url=f"http://{running.http_address}/v1", api_key="none", max_retries=0)
        raw = await client.responses.with_raw_response.create(model=MODEL, input="Close them.", tools=TOOLS)
        calls: list[Any] = raw.parse().output
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "closed"} for call in calls]
        history = [{"role": "user", "content": "Close them."}, *(call.model_dump() for call in calls), *results]
        final = await client.responses.create(model=MODEL, input=history, tools=TOOLS)
        await client.close()
    assert raw.headers["x-outrider-ignored"] == "tools[3]"
    assert [(call.namespace, call.name, json.loads(call.arguments)) for call in calls] == [
        ("multi_agent_v1", "close_agent", {"target": "a"}),
        ("mcp__files__", "close_agent", {"target": "b"}),
    ]
    first, second = (prompt_of(request, tokenizer) for request in router.requests)
    assert "web_search" not in first and "multi_agent_v1__close_agent" in first
    assert said.split("\n")[1] in second and second.count("closed") == 2
    assert final.output_text == "Done."


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("codex"), "@openai/codex@0.171.0") / "codex"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_session_of_codex_runs_a_command_and_calls_a_function_of_a_namespace(
    codex: Path, gateway: OpenGateway, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    command = called("exec_command", cmd="echo made by codex > made.txt")
    router = scripted(tokenizer, command, called("multi_agent_v1__close_agent", target="nobody"), "All is done.")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    async with routing(router) as address, gateway(address) as running:
        settings = SETTINGS.format(model=MODEL, url=f"http://{running.http_address}/v1")
        (home / "config.toml").write_text(settings)
        flags = ("--skip-git-repo-check", "--sandbox", "danger-full-access")
        env = {**os.environ, "CODEX_HOME": str(home)}
        output = await output_of(str(codex), "exec", *flags, "Make the file.", cwd=work, env=env)
    assert (work / "made.txt").read_text() == "made by codex\n"
    assert "All is done." in output
    third = prompt_of(router.requests[2], tokenizer)
    result = third.rpartition("<tool_response>")[2]
    assert "nobody" in result and "unsupported call" not in result, result
