"""A target whose engine fails at every step ends, and its sequences move: it would look idle and draw all traffic."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import pytest
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import target_pb2_grpc
from outrider.worker.watchdog import EXIT_BROKEN

from tests.ports import free_port

from .test_server import Router, open_sequence

# From its twentieth step on, as a CUDA context after an illegal access.
_DYING = """
import sys
from outrider.engine import Engine
from outrider.target.__main__ import main

steps, forward = iter(range(20)), Engine.forward

def dying(self, rows):
    if next(steps, None) is None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return forward(self, rows)

Engine.forward = dying
sys.exit(main())
"""


# The start of a target is some 6 s of processor time.
@pytest.mark.slow
async def test_a_target_that_fails_every_step_breaks_its_streams_and_ends(tiny: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    options = ("--model", str(tiny), "--listen", address, "--threads", "1", "--dtype", "float32")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _DYING, *options, stderr=asyncio.subprocess.PIPE
    )
    async with create_channel(address) as channel:
        await channel.channel_ready()
        router = Router(target_pb2_grpc.TargetServiceStub(channel))  # type: ignore[arg-type]
        stopping = sp.Stopping(max_new_tokens=400)
        await router.send(opens=[open_sequence(number, [5, 6], stopping=stopping) for number in (1, 2, 3)])
        with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
            await router.finished(1, 2, 3)
    # Nobody is told that a sequence failed: its router opens it elsewhere.
    assert set(router.text) == {1, 2, 3} and not router.errors
    _, log = await process.communicate()
    assert process.returncode == EXIT_BROKEN
    assert b"3 whole steps in a row have failed: this worker ends" in log
