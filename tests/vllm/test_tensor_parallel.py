"""A model divided among two processes of vLLM: equal texts, and what happens when one of them dies or stands still."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from outrider.errors import Code
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.worker.watchdog import EXIT_BROKEN

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.processes import all_ended, ranks, target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SEEDED = {"sampling": sp.Sampling(temperature=0.8, top_p=0.95, seed=5), "mode": sp.VERIFICATION_MODE_COUPLED}
PROMPTS = [[3 + (7 * n + k) % 250 for k in range(5 + n)] for n in range(12)]
TWO = ("--tensor-parallel", "2")


async def texts(stub: Any) -> list[list[int]]:
    """With the target's own drafts."""
    router = Router(stub)
    opens = [
        open_sequence(
            12 * kind + n + 1,
            prompt,
            stopping=sp.Stopping(max_new_tokens=40),
            speculation=sp.Speculation(max_own_draft_tokens=4),
            logprobs=sp.LogprobsOptions(num_top=2),
            **mode,
        )
        for kind, mode in enumerate(({}, SEEDED))
        for n, prompt in enumerate(PROMPTS)
    ]
    await router.send(opens=opens)
    await router.finished(*range(1, 25))
    assert not router.errors
    return [router.text[number] for number in range(1, 25)]


async def test_texts_are_those_of_one_process(tiny_vllm: Path) -> None:
    async with target(tiny_vllm) as alone:
        wanted = await texts(alone.stub)
    async with target(tiny_vllm, *TWO) as divided:
        assert divided.info.model_revision.endswith("tp2")
        found = await texts(divided.stub)
    assert [one == other for one, other in zip(found, wanted, strict=True)].count(True) == 24


async def returned(router: Router) -> None:
    """Its sequences are returned to their router or its stream breaks: routers read both as: continue it elsewhere."""
    try:
        while not router.errors:
            await router.read()
    except (AssertionError, grpc.RpcError):
        return
    assert all(error.code == Code.UNAVAILABLE for error in router.errors.values())


@pytest.mark.parametrize("planted", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_dies_or_hangs_ends_the_worker_with_all_its_processes(
    tiny_vllm: Path, planted: signal.Signals
) -> None:
    async with target(tiny_vllm, *TWO, "--step-timeout", "60") as running:
        every, router = ranks(running.process.pid, 2), Router(running.stub)
        await router.send(opens=[open_sequence(1, [5, 6, 7], stopping=sp.Stopping(max_new_tokens=490))])
        await router.read()
        every[1].send_signal(planted)
        await returned(router)
        assert not router.finish
        # What supervises the process starts it again.
        assert await asyncio.to_thread(running.process.wait, 120) == EXIT_BROKEN
        await all_ended(every)
