"""Processes of their own: targets on vLLM, and drafts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2

START_S = 300.0
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
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", *arguments])


@contextlib.asynccontextmanager
async def running(*arguments: str, draft: bool = False) -> AsyncIterator[Running]:
    """A worker that serves. It is killed at the end."""
    address = free_address()
    module = "outrider.draft" if draft else "outrider.target"
    process = await asyncio.to_thread(_start, module, "--listen", address, *arguments)
    try:
        async with create_channel(address) as channel:
            stub: Any = (draft_pb2_grpc.DraftServiceStub if draft else target_pb2_grpc.TargetServiceStub)(channel)
            asked: Any = draft_pb2.DraftServiceGetInfoRequest() if draft else target_pb2.TargetServiceGetInfoRequest()
            async with asyncio.timeout(START_S):
                while True:
                    assert process.poll() is None, f"{module} ended with {process.returncode}"
                    try:
                        info = (await stub.GetInfo(asked, timeout=5)).info
                        break
                    except grpc.RpcError:
                        await asyncio.sleep(0.3)
            yield Running(process, address, stub, info)
    finally:
        process.kill()
        process.wait()


def target(model: Path, *arguments: str) -> contextlib.AbstractAsyncContextManager[Running]:
    return running("--engine", "vllm", "--model", str(model), *OPTIONS, *arguments)


def drafting(model: Path) -> contextlib.AbstractAsyncContextManager[Running]:
    return running("--model", str(model), draft=True)
