"""python -m outrider.draft, from the command line to the last signal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.errors import Code
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import draft_pb2, sequence_pb2
from outrider.rpc.v1.draft_pb2_grpc import DraftServiceStub

from .conftest import until
from .test_service import commit, opening, read


@asynccontextmanager
async def worker(tiny: Path, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A running worker and its address."""
    options = ["--model", str(tiny), "--listen", "127.0.0.1:0", "--dtype", "float32", "--threads", "1", *arguments]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.draft", *options, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while b" serves " not in (line := await process.stderr.readline()):
                assert line, "the worker ended before it listened"
        yield process, json.loads(line)["message"].split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.slow
async def test_a_stop_signal_refuses_new_sequences_finishes_the_open_ones_and_exits_0(tiny: Path) -> None:
    async with worker(tiny) as (process, address), create_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="outrider.rpc.v1.DraftService")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        call = DraftServiceStub(channel).Draft()
        await call.write(draft_pb2.DraftRequest(opens=[opening(1)]))
        await read(call)
        process.send_signal(signal.SIGTERM)

        async def is_draining() -> bool:
            return bool((await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING)

        await until(is_draining)
        await call.write(draft_pb2.DraftRequest(opens=[opening(2)], commits=[commit(1, 8, 23)]))
        response = await read(call)
        assert [(e.sequence_id, e.reason) for e in response.errors] == [(2, "DRAINING")]
        assert [draft.sequence_id for draft in response.drafts] == [1]
        await call.write(draft_pb2.DraftRequest(closes=[sequence_pb2.CloseSequence(sequence_id=1)]))
        assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.slow
async def test_what_does_not_finish_in_time_is_given_back(tiny: Path) -> None:
    async with worker(tiny, "--drain-timeout", "0.1") as (process, address), create_channel(address) as channel:
        call = DraftServiceStub(channel).Draft()
        await call.write(draft_pb2.DraftRequest(opens=[opening(1)]))
        await read(call)
        process.send_signal(signal.SIGTERM)
        [error] = (await read(call)).errors
        assert (error.sequence_id, error.code) == (1, Code.UNAVAILABLE)
        assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.slow
async def test_a_missing_model_ends_the_process_with_a_message_that_names_it() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.draft", "--model", "/nowhere", "--listen", "127.0.0.1:0", stderr=-1
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"/nowhere" in stderr
    assert b"Traceback" not in stderr
