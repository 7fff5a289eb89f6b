"""Processes of their own: targets on vLLM, and drafts. None outlives its block, nor what it has started itself."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2

from tests.integration.target.test_server import until
from tests.ports import free_port

START_S = 1800.0
OPTIONS = (
    *("--dtype", "float32", "--max-sequences", "40", "--max-draft-tokens", "8"),
    "--vllm-args=--kv-cache-memory-bytes=200000000",
)


@dataclass(frozen=True, slots=True)
class Running:
    process: subprocess.Popen[bytes]
    address: str
    stub: Any
    info: worker_pb2.WorkerInfo


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def ranks(pid: int, count: int) -> list[psutil.Process]:
    """The processes of the model that this one has started, by the title that vLLM gives them."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "VLLM::Worker" in " ".join(child.cmdline()):
                found.append(child)
    return found[:count]


async def all_ended(processes: Sequence[psutil.Process]) -> None:
    """Returns once they have. Who reaps them is not for us to say."""

    def has_ended(process: psutil.Process) -> bool:
        try:
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    await until(lambda: all(map(has_ended, processes)))


@contextlib.contextmanager
def ending(process: subprocess.Popen[bytes], patience_s: float = 0.0) -> Iterator[None]:
    """Ends it after the block, with what it has started; by SIGTERM if it obeys in this time."""
    try:
        yield
    finally:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        if patience_s:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", *arguments])


@contextlib.asynccontextmanager
async def running(*arguments: str, draft: bool = False) -> AsyncIterator[Running]:
    """A worker that serves. It is killed after the block."""
    address = free_address()
    module = "outrider.draft" if draft else "outrider.target"
    process = await asyncio.to_thread(_start, module, "--listen", address, *arguments)
    with ending(process):
        async with create_channel(address) as channel:
            stub: Any = (draft_pb2_grpc.DraftServiceStub if draft else target_pb2_grpc.TargetServiceStub)(channel)
            asked: Any = draft_pb2.DraftServiceGetInfoRequest() if draft else target_pb2.TargetServiceGetInfoRequest()
            async with asyncio.timeout(START_S):
                while True:
                    assert process.poll() is None, f"{module} ended with {process.returncode}"
                    try:
                        info = (await stub.GetInfo(asked, timeout=60)).info
                        break
                    except grpc.RpcError:
                        await asyncio.sleep(0.3)
            yield Running(process, address, stub, info)


def target(model: Path, *arguments: str) -> contextlib.AbstractAsyncContextManager[Running]:
    return running("--engine", "vllm", "--model", str(model), *OPTIONS, *arguments)


def drafting(model: Path) -> contextlib.AbstractAsyncContextManager[Running]:
    return running("--model", str(model), draft=True)
