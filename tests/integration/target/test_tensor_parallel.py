"""One target on two processes: the same tokens, and back within seconds when either is killed or stands still."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import target_pb2_grpc

from tests.ports import free_port

from .test_server import GREEDY, SAMPLED, Router, open_sequence
from .test_server import target as target_alone

# Each start of the ranks imports torch anew.
pytestmark = pytest.mark.timeout(400)

SERVED_AGAIN_S = 90.0
# A process that has initialised CUDA, as torchao does when it is imported: its forks are of no use.
NO_FORK = """
import os, sys
os.register_at_fork(after_in_child=lambda: os._exit(77))
from outrider.target.__main__ import main
sys.exit(main())
"""
OPTIONS = ("--dtype", "float32", "--block-size", "8", "--max-batch-tokens", "64", "--max-sequences", "40")


class Served:
    """A running `outrider.target`."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return sorted((c for c in children if c.name().startswith("outrider-tp-")), key=lambda c: str(c.name()))

    async def until_serving(self) -> None:
        async with asyncio.timeout(100), create_channel(self.address) as channel:
            await channel.channel_ready()

    async def answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        async with create_channel(self.address) as channel:
            return await answers(target_pb2_grpc.TargetServiceStub(channel), prompts)  # type: ignore[arg-type]


async def answers(stub: target_pb2_grpc.TargetServiceAsyncStub, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All at once, greedy and sampled in turns. Raises RpcError when the stream breaks."""
    router = Router(stub)
    await router.send(opens=[_opening(number, prompt) for number, prompt in enumerate(prompts, 1)])
    await router.finished(*range(1, len(prompts) + 1))
    assert not router.errors
    return [router.text[number] for number in range(1, len(prompts) + 1)]


def _opening(number: int, prompt: Sequence[int]) -> sp.OpenSequence:
    stopping = sp.Stopping(max_new_tokens=24)
    if number % 2:
        return open_sequence(number, prompt, sampling=GREEDY, stopping=stopping)
    mode = sp.VERIFICATION_MODE_COUPLED
    return open_sequence(number, prompt, sampling=SAMPLED, mode=mode, stopping=stopping)


@asynccontextmanager
async def served(model: Path, *arguments: str) -> AsyncIterator[Served]:
    address = f"127.0.0.1:{free_port()}"
    options = ("--model", str(model), "--listen", address, "--threads", "1", *OPTIONS, *arguments)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", NO_FORK, *options)
    try:
        found = Served(process, address)
        await found.until_serving()
        yield found
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def prompts(count: int) -> list[list[int]]:
    """Some longer than a step takes."""
    rng = random.Random(5)
    return [[rng.randrange(3, 259) for _ in range(rng.choice((3, 20, 150)))] for _ in range(count)]


async def test_two_processes_say_what_one_says(tiny: Path) -> None:
    async with target_alone(tiny) as (_, stub):
        expected = await answers(stub, prompts(12))
    async with served(tiny, "--tensor-parallel", "2") as both:
        assert len(both.ranks()) == 2
        assert await both.answers(prompts(12)) == expected


@pytest.mark.slow
async def test_a_killed_rank_is_a_pause(tiny: Path) -> None:
    async with served(tiny, "--tensor-parallel", "2") as target:
        expected = await target.answers(prompts(4))
        for rank in (1, 0):
            before = {process.pid for process in target.ranks()}
            await _killed_in_mid_stream(target, rank)
            assert await _answers_again(target) == expected
            assert not any(psutil.pid_exists(pid) for pid in before), "the whole group is new"


async def _killed_in_mid_stream(target: Served, rank: int) -> None:
    """The stream ends with an error, at once: it does not hang."""
    async with create_channel(target.address) as channel:
        router = Router(target_pb2_grpc.TargetServiceStub(channel))  # type: ignore[arg-type]
        await router.send(opens=[open_sequence(1, [5, 6, 7], stopping=sp.Stopping(max_new_tokens=400))])
        while len(router.text.get(1, ())) < 5:
            await router.read()
        target.ranks()[rank].kill()
        with pytest.raises(grpc.RpcError):
            async with asyncio.timeout(60):
                while 1 not in router.finish:
                    await router.call.read()


async def _answers_again(target: Served) -> list[list[int]]:
    since_s = time.monotonic()
    while True:
        try:
            return await target.answers(prompts(4))
        except (grpc.RpcError, AssertionError):
            assert time.monotonic() - since_s < SERVED_AGAIN_S, "not served again in time"
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_rank_that_stands_still_is_taken_for_dead(tiny: Path) -> None:
    async with served(tiny, "--tensor-parallel", "2", "--step-timeout", "3") as target:
        expected = await target.answers(prompts(4))
        for rank in (1, 0):
            still = target.ranks()[rank]
            still.send_signal(signal.SIGSTOP)
            _, alive = await asyncio.to_thread(psutil.wait_procs, [still], 10)
            assert not alive, "nobody noticed"
            assert await _answers_again(target) == expected


@pytest.mark.slow
async def test_a_stop_signal_ends_every_process_with_code_0(tiny: Path) -> None:
    async with served(tiny, "--tensor-parallel", "2") as target:
        ranks = target.ranks()
        target.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(target.process.wait(), 60) == 0
        assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
async def test_no_rank_outlives_who_started_it(tiny: Path) -> None:
    async with served(tiny, "--tensor-parallel", "2") as target:
        ranks = target.ranks()
        target.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, 5)
        assert not alive


@pytest.mark.slow
async def test_what_cannot_be_divided_ends_the_command_with_the_reason_and_is_not_tried_again(tiny: Path) -> None:
    options = ("--model", str(tiny), "--listen", "127.0.0.1:0", *OPTIONS, "--tensor-parallel", "4")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.target", *options, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 1
    assert b"tensor_parallel: 2 num_key_value_heads" in stderr
    assert b"started again" not in stderr
    assert b"Traceback" not in stderr
