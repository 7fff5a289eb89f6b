"""A target on vLLM whose router leaves, that drains, that hangs, and what it says of itself."""

from __future__ import annotations

import asyncio
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider.errors import Code
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.worker.watchdog import EXIT_BROKEN

from tests.integration.target.test_server import Router, open_sequence, until
from tests.vllm.processes import all_ended, ranks, target
from tests.vllm.served import Loaded, loaded, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LONG = sp.Stopping(max_new_tokens=400)


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path) -> Iterator[Loaded]:
    with loaded(tiny_vllm) as made:
        yield made


def said(address: str, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{page}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_the_blocks_of_a_router_that_is_gone_are_free(engine: Loaded) -> None:
    free = engine.num_free_blocks
    async with running(engine) as (worker, stub):
        leaves, stays = Router(stub), Router(stub)
        await leaves.send(opens=[open_sequence(number, [5, 6, number], stopping=LONG) for number in range(1, 9)])
        await stays.send(opens=[open_sequence(1, [5, 6, 7], stopping=LONG)])
        await leaves.read()
        assert engine.num_free_blocks < free
        leaves.call.cancel()
        await until(lambda: worker.servicer.steps.load.num_sequences <= 1)
        await stays.finished(1)
        await until(lambda: worker.servicer.steps.load.num_sequences == 0)
    assert len(stays.text[1]) == 400
    assert engine.num_free_blocks == free and not engine.scheduler.requests


async def test_the_drain_finishes_what_runs_and_refuses_what_comes(engine: Loaded) -> None:
    async with running(engine) as (worker, stub):
        router = Router(stub)
        await router.send(opens=[open_sequence(1, [5, 6], stopping=LONG)])
        await router.read()
        drained = asyncio.create_task(worker.drain(timeout_s=120))
        await asyncio.sleep(0)
        assert worker.servicer.load_message().draining
        await router.send(opens=[open_sequence(2, [5, 6])])
        await router.finished(1, 2)
        await drained
    assert len(router.text[1]) == 400
    assert router.errors[2].code == Code.UNAVAILABLE


async def test_an_impatient_drain_gives_the_rest_back_and_frees_its_blocks(engine: Loaded) -> None:
    free = engine.num_free_blocks
    async with running(engine) as (worker, stub):
        router = Router(stub)
        await router.send(opens=[open_sequence(1, [5, 6], stopping=LONG)])
        await router.read()
        await worker.drain(timeout_s=0.0)
        await router.finished(1)
    # What a router continues elsewhere.
    assert router.errors[1].code == Code.UNAVAILABLE and len(router.text[1]) < 400
    assert engine.num_free_blocks == free


async def test_a_step_that_hangs_is_not_live(engine: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    async with running(engine, step_timeout_s=0.5) as (worker, stub):
        assert said(worker.ops_address, "/livez")[0] == 200
        monkeypatch.setattr(engine.core, "step_fn", lambda: released.wait(120) and ({}, False))
        try:
            await Router(stub).send(opens=[open_sequence(1, [5, 6])])
            async with asyncio.timeout(60):
                while (found := await asyncio.to_thread(said, worker.ops_address, "/livez"))[0] == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert found[0] == 503 and found[1].startswith("step: ")
        finally:
            monkeypatch.undo()
            released.set()


async def test_a_process_of_vllm_that_hangs_ends_the_worker(tiny_vllm: Path) -> None:
    async with target(tiny_vllm, "--step-timeout", "10") as found:
        router = Router(found.stub)
        await router.send(opens=[open_sequence(1, [5, 6, 7], stopping=LONG)])
        await router.read()
        (model,) = ranks(found.process.pid, 1)
        model.send_signal(signal.SIGSTOP)
        assert await asyncio.to_thread(found.process.wait, 120) == EXIT_BROKEN
        await all_ended([model])


async def test_the_ops_port_has_our_metrics_and_vllms(engine: Loaded) -> None:
    async with running(engine) as (worker, stub):
        router = Router(stub)
        await router.send(opens=[open_sequence(1, [5, 6, 7], stopping=sp.Stopping(max_new_tokens=30))])
        await router.finished(1)
        await until(lambda: worker.servicer.steps.load.num_sequences == 0)
        _, page = await asyncio.to_thread(said, worker.ops_address, "/metrics")
        _, renamed = await asyncio.to_thread(said, worker.ops_address, "/metrics/vllm")
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    ours = [line for line in lines if line.startswith("outrider_generation_tokens_total")]
    assert [float(line.split()[-1]) for line in ours] == [30]
    assert any(line.startswith("vllm:num_requests_waiting_by_reason{") for line in lines)
    # What we measure too appears under vLLM's name there, once.
    assert any(line.startswith("vllm:kv_cache_usage_perc{") for line in renamed.splitlines())
    names = [line.partition(" ")[0] for line in lines]
    assert len(names) == len(set(names)), "a sample appears twice"
