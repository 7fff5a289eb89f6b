"""Stock clients, unchanged and in an environment of their own, before a whole stack."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from outrider_controller.cli.up.stack import Stack

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
CLIENTS = ("openai", "langchain", "litellm", "instructor", "pydantic_ai")
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


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_stock_client_gets_what_it_asks_for(client: str, stack: Stack) -> None:
    url = f"http://{stack.gateway_http}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none") as ours:
        [model] = (await ours.models.list()).data
    await program(client, f"{client}_client", url, model.id)


async def program(client: str, name: str, url: str, model: str) -> None:
    """Runs one of `tests.e2e.clients`. LiteLLM would look for prices in the network."""
    python = await asyncio.to_thread(interpreter, client)
    arguments = [str(python), "-m", f"tests.e2e.clients.{name}", url, model]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, env=environment, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]
