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
PACKAGES = (
    "openai>=2,<3",
    "langchain-openai>=1,<2",
    # Its bridges import what only its proxy asks for.
    "litellm[proxy]>=1.80,<2",
    "instructor>=1.10,<2",
    "pydantic-ai-slim[openai]>=1,<3",
)


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the clients' environment, which is kept for the next run."""
    directory = ROOT / "build" / "clients" / ".venv"
    done, interpreter = directory / "installed.txt", directory / "bin" / "python"
    if not done.exists() or done.read_text() != repr(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True, timeout=120)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        installed = subprocess.run([*pip, *PACKAGES], check=False, timeout=900, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"the clients cannot be installed: {installed.stderr.strip()[-300:]}")
        done.write_text(repr(PACKAGES))
    return interpreter


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_stock_client_gets_what_it_asks_for(client: str, python: Path, stack: Stack) -> None:
    url = f"http://{stack.gateway_http}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none") as ours:
        [model] = (await ours.models.list()).data
    program = [str(python), "-m", f"tests.e2e.clients.{client}_client", url, model.id]
    # LiteLLM would look for prices in the network.
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = await asyncio.create_subprocess_exec(*program, cwd=ROOT, env=environment, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]
