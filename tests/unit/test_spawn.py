"""Children: where they run, when they end, and that starting them is safe beside gRPC."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.rpc.channel import create_channel
from outrider.rpc.server import create_server, serving
from outrider.runtime.spawn import bound_to_us

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child is started as it is")

PARENT = """
import subprocess, sys
from outrider.runtime.spawn import bound_to_us
child = subprocess.Popen(bound_to_us(["sleep", "60"]), stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


async def _asks_without_pause(address: str) -> None:
    async with create_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            await stub.Check(health_pb2.HealthCheckRequest())


async def test_every_child_of_a_process_busy_with_grpc_is_started() -> None:
    async with serving(create_server(), "127.0.0.1:0", services=[], grace_s=0.1) as life:
        await life.ready()
        busy = [asyncio.create_task(_asks_without_pause(life.address)) for _ in range(20)]
        try:
            for _ in range(15):
                await asyncio.sleep(0.01)
                child = await asyncio.create_subprocess_exec(*bound_to_us(["true"]))
                assert await child.wait() == 0
        finally:
            for task in busy:
                task.cancel()
            ended = await asyncio.gather(*busy, return_exceptions=True)
    assert not [error for error in ended if isinstance(error, grpc.RpcError)]


def test_it_runs_on_its_cores_only() -> None:
    core = max(os.sched_getaffinity(0))
    tell = "import os; print(os.sched_getaffinity(0))"
    said = subprocess.check_output(bound_to_us([sys.executable, "-c", tell], (core,)), text=True)
    assert said.strip() == str({core})


def test_its_output_exit_code_and_environment_are_the_commands_own() -> None:
    command = bound_to_us(["sh", "-c", "echo $OUTRIDER_SPAWNED; exit 7"])
    done = subprocess.run(command, env={**os.environ, "OUTRIDER_SPAWNED": "yes"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "yes\n", "")


def test_it_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([child], 10)
    assert not alive


def test_a_missing_program_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such program: "):
        bound_to_us([str(tmp_path / "nothing")])
