"""A session of Claude Code as it is installed, over `/v1/messages`."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import router_pb2

from tests.integration.gateway.conftest import OpenGateway, installed, output_of, prompt_of
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, routing, saying

CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.197"


@pytest.fixture(scope="module")
def claude_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("claude-code"), CLAUDE_CODE) / "claude"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_session_of_claude_code_runs_a_command_and_reads_its_result(
    claude_code: Path, gateway: OpenGateway, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    arguments = {"command": "echo made by claude > made.txt; echo it is made", "description": "Makes it."}
    call = f"<tool_call>\n{json.dumps({'name': 'Bash', 'arguments': arguments})}\n</tool_call>"

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        # The client also asks about other things, such as a title.
        prompt = prompt_of(request, tokenizer)
        said = "All is done." if "it is made\n" in prompt else call if "Make the file." in prompt else "A title"
        async for response in saying([*tokenizer.encode(said), 2], size=7)(request):
            yield response

    router = ScriptedRouter(script, max_context_len=400_000)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    async with routing(router) as address, gateway(address) as running:
        own = {
            "ANTHROPIC_BASE_URL": f"http://{running.http_address}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "HOME": str(home),
        }
        env = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ} | own
        command = (str(claude_code), "--print", "--allowedTools", "Bash", "--", "Make the file.")
        output = await output_of(*command, cwd=work, env=env)
    assert (work / "made.txt").read_text() == "made by claude\n"
    assert "All is done." in output
