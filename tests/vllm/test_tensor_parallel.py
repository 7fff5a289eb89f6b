"""A model divided among two processes of vLLM: equal texts, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from outrider.engine.parallel.watchdog import EXIT_BROKEN
from outrider.errors import Code
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.processes import Running, target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDED = {"sampling": sp.Sampling(temperature=0.8, top_p=0.95, seed=5), "mode": sp.VERIFICATION_MODE_COUPLED}
PROMPTS = [[3 + (7 * n + k) % 250 for k in range(5 + n)] for n in range(12)]


async def texts(stub: Any) -> list[list[int]]:
    router = Router(stub)
    opens = [
        open_sequence(12 * kind + n + 1, prompt, stopping=sp.Stopping(max_new_tokens=40), **mode)
        for kind, mode in enumerate(({}, SEEDED))
        for n, prompt in enumerate(PROMPTS)
    ]
    await router.send(opens=opens)
    await router.finished(*range(1, 25))
    assert not router.errors
    return [router.text[number] for number in range(1, 25)]


def ranks(running: Running) -> list[psutil.Process]:
    """The processes of the model: those that hold most memory."""
    children = psutil.Process(running.process.pid).children(recursive=True)
    return sorted(children, key=lambda one: -one.memory_info().rss)[:2]


async def test_texts_are_those_of_one_process_and_a_dead_rank_ends_the_worker(tiny_vllm: Path) -> None:
    async with target(tiny_vllm) as alone:
        wanted = await texts(alone.stub)
    async with target(tiny_vllm, "--tensor-parallel", "2") as divided:
        assert divided.info.model_revision.endswith("tp2")
        assert await texts(divided.stub) == wanted
        router = Router(divided.stub)
        await router.send(opens=[open_sequence(1, [5, 6, 7], stopping=sp.Stopping(max_new_tokens=490))])
        await router.read()
        os.kill(ranks(divided)[1].pid, signal.SIGKILL)
        # What routers read as: continue it elsewhere.
        with pytest.raises(AssertionError, match="stream ended"):
            while not router.errors:
                await router.read()
            raise AssertionError("the stream ended")
        assert all(error.code == Code.UNAVAILABLE for error in router.errors.values())
        async with asyncio.timeout(60):
            while divided.process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert divided.process.returncode == EXIT_BROKEN
    # What supervises the process starts it again.
    async with target(tiny_vllm, "--tensor-parallel", "2") as again:
        assert await texts(again.stub) == wanted
