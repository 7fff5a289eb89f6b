"""`outrider up --engine vllm` with two ranks and no draft workers: it speculates, and a rank that dies is a pause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.vllm.processes import ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STACK = Path(os.environ.get("OUTRIDER_PYTHON", ".venv/bin/python"))
"""Of the environment that has router and gateway: vLLM's own has no Ray."""
OPTIONS = (
    *("--engine", "vllm", "--vllm-python", sys.executable, "--tensor-parallel", "2", "--drafts", "0"),
    *("--target-args", "--dtype float32 --kv-cache-bytes 200000000", "--start-timeout", "1800"),
    *("--http-port", "0", "--grpc-port", "0", "--control-port", "0", "--context", "vllm-test", "-o", "json"),
)


@contextlib.asynccontextmanager
async def up(model: Path, directory: Path) -> AsyncIterator[dict[str, Any]]:
    """What `outrider up` says when everything is ready."""
    command = (str(STACK), "-m", "outrider_controller.cli", "up", "--target-model", str(model), *OPTIONS)
    places = {"OUTRIDER_STATE": str(directory / "state"), "OUTRIDER_CACHE": str(directory / "cache")}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **places}, limit=1 << 20
    )
    assert process.stdout is not None
    try:
        said = b""
        while not said.rstrip().endswith(b"\n}"):
            line = await asyncio.wait_for(process.stdout.readline(), 900)
            assert line, said
            said += line
        yield json.loads(said)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


def counts(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["metrics"]["speculative_decoding"]
    return found


@pytest.mark.skipif(not STACK.exists(), reason="needs `make proto` too: the environment of router and gateway")
async def test_a_stack_without_draft_workers_speculates_on_vllm_and_a_rank_that_dies_is_a_pause(
    tiny_vllm: Path, tmp_path: Path
) -> None:
    async with up(tiny_vllm, tmp_path) as stack:
        client = AsyncOpenAI(base_url=f"http://{stack['http']}/v1", api_key="x", timeout=1800, max_retries=0)
        ask: dict[str, Any] = {"model": stack["model"], "prompt": "a b a b a b a b", "max_tokens": 300}
        more = {"ignore_eos": True, "include_metrics": True}
        for sampling in ({"temperature": 0.0}, {"temperature": 0.7, "seed": 3}):
            ask |= sampling
            # So likely that the text repeats it, which is looked up.
            repeating = ask | {"logit_bias": {"40": 20}}
            plain = await client.completions.create(**repeating, extra_body={**more, "speculation": "off"})
            drafted = await client.completions.create(**repeating, extra_body={**more, "speculation": "on"})
            assert drafted.choices[0].text == plain.choices[0].text
            assert counts(drafted)["num_accepted_draft_tokens"] > 0
            assert counts(plain)["num_draft_tokens"] == 0
        text = (await client.completions.create(**ask, extra_body={"ignore_eos": True})).choices[0].text
        # Nobody else serves this model: the answer waits until the target has been started again.
        found, chunk = "", None
        async for chunk in await client.completions.create(**ask, stream=True, extra_body=more):
            if not found:
                (pid,) = [row["pid"] for row in stack["processes"] if row["process"] == "target-0"]
                ranks(pid, 2)[0].kill()
            found += chunk.choices[0].text if chunk.choices else ""
        assert found == text
        assert counts(chunk)["num_target_failovers"] == 1
