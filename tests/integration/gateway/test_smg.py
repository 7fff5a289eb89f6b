"""The Shepherd Model Gateway, unchanged and in an environment of its own, before a gateway of ours."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer

from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.scripted_router import EOS, MODEL, ScriptedRouter, routing, saying
from tests.ports import free_port

pytest.importorskip("smg_grpc_proto")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 120


@pytest.fixture(scope="module")
def smg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smg")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, timeout=120)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "smg>=1.13,<2"], check=True, timeout=400)
    return directory / "bin" / "smg"


@asynccontextmanager
async def before(program: Path, worker: str) -> AsyncIterator[str]:
    """smg with our gateway as its only worker. Yields the URL of its API."""
    port = free_port()
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    arguments = ["launch", *listen, "--worker-urls", f"grpc://{worker}", "--backend", "vllm"]
    process: Process = await asyncio.create_subprocess_exec(str(program), *arguments, stdout=DEVNULL, stderr=DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        await process.wait()


async def when_ready(client: openai.AsyncOpenAI, **request: Any) -> Any:
    """Its answer, once it knows the worker and has the tokenizer from it."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                return await client.chat.completions.create(**request)
            except (openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
                await asyncio.sleep(0.2)


async def test_what_smg_answers_is_what_the_gateway_answers(
    smg: Path, gateway: OpenGateway, tokenizer: ModelTokenizer
) -> None:
    text = "Grüße, 世界! And on it goes."
    router = ScriptedRouter(saying([*tokenizer.encode(text), EOS], size=3))
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "seed": 7,
        "presence_penalty": 0.5,
        "max_tokens": 64,
    }
    async with (
        routing(router) as address,
        gateway(address, vllm_engine_model=MODEL) as running,
        before(smg, running.grpc_address) as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as through,
        openai.AsyncOpenAI(base_url=f"http://{running.http_address}/v1", api_key="none", max_retries=0) as straight,
    ):
        whole = await when_ready(through, **request)
        ours = await straight.chat.completions.create(**request)
        stream = await through.chat.completions.create(**request, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        cut = await through.chat.completions.create(**request | {"stop": ["And"]})
    assert whole.choices[0].message.content == ours.choices[0].message.content == streamed == text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == ours.usage.completion_tokens
    assert cut.choices[0].message.content == text.partition("And")[0]
    # Both had the same of us: the prompt as the same template writes it, and all that was asked.
    first, second, *_ = router.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert (first.sampling, first.logits) == (second.sampling, second.logits)
