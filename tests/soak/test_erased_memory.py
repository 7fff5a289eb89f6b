"""A deleted tenant's texts are in the memory of no process: it is searched, with freed memory overwritten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, tenants_pb2
from outrider.testing.tiny import tiny_checkpoint, tiny_tokenizer
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig

from benchmarks.support.asking import Keyed, make_request
from tests.soak.memory import OVERWRITING, Mark
from tests.soak.rolling import without_ray

# At least 20 tokens: of shorter tuples Python keeps some that are freed, as they were, until it collects cycles.
TEXT = "q7zw9xkvbq2jhm4tw8c5zvnx"
SOON_S = 180.0
pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(900)]


@dataclass
class Client:
    """Of one tenant, by every road."""

    stack: Stack
    key: str

    async def ask(self, text: str) -> None:
        model, chat = self.stack.config.model, [{"role": "user", "content": text}]
        async with Keyed(self.stack.gateway_grpc, self.key) as by_grpc, self._http() as by_http:
            await by_grpc.answer(make_request(model, text, "on", max_tokens=24, ignore_eos=True))
            for path, fields in (
                ("/v1/chat/completions", {"messages": chat, "max_tokens": 24}),
                ("/v1/chat/completions", {"messages": chat, "max_tokens": 24, "stream": True}),
                ("/v1/chat/completions", {"messages": chat, "max_tokens": 24, "response_format": _format(text)}),
                ("/v1/completions", {"prompt": text, "max_tokens": 24, "stop": [text]}),
                ("/v1/responses", {"input": text, "max_output_tokens": 24}),
                ("/v1/messages", {"messages": chat, "max_tokens": 24}),
                ("/tokenize", {"prompt": text}),
            ):
                answer = await by_http.post(path, json={"model": model, **fields})
                assert answer.status_code == 200, answer.text

    def _http(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=f"http://{self.stack.gateway_http}", headers=headers, timeout=120)


def _format(text: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"enum": [text]}, "b": {"type": "string", "pattern": text}}}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Stack]:
    tiny = tiny_checkpoint(directory / "tiny", max_context_len=4096)
    worker = f"--dtype float32 --kv-cache-bytes {64 << 20}"
    config = StackConfig(
        target_model=str(tiny),
        draft_model=str(tiny),
        target_args=f"{worker} --lookups suffix",
        draft_args=worker,
        run_dir=directory / "run",
    )
    async with Stack(config, amend=without_ray) as stack:
        yield stack


def left(stack: Stack, mark: Mark) -> dict[str, list[str]]:
    """By process, also those that processes have started."""
    found = {}
    for name, process in stack.processes.items():
        for each in (ours := psutil.Process(process.pid), *ours.children(recursive=True)):
            found[f"{name} {each.pid}"] = mark.places(each.pid)
    return {name: places for name, places in found.items() if places}


async def test_a_deleted_tenants_texts_are_in_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OVERWRITING.items():
        monkeypatch.setenv(name, value)
    mark = Mark(TEXT, tiny_tokenizer().encode(TEXT))
    async with running(tmp_path) as stack, create_channel(stack.control) as channel:
        control: Any = control_pb2_grpc.ControlServiceStub(channel)
        tenants = [tenants_pb2.Tenant(name=name) for name in "ab"]
        await control.PutTenants(control_pb2.PutTenantsRequest(tenants=tenants))
        keys = [await control.CreateKey(control_pb2.CreateKeyRequest(tenant=one.name)) for one in tenants]
        erased, other = (Client(stack, one.key) for one in keys)
        for number in range(3):
            await erased.ask(f"{TEXT} {number} {TEXT}")
        assert len(left(stack, mark)) > 1
        deleted = await control.DeleteTenant(control_pb2.DeleteTenantRequest(name="a"))
        assert not deleted.pending
        until_s = time.monotonic() + SOON_S
        while found := await asyncio.to_thread(left, stack, mark):
            assert time.monotonic() < until_s, found
            # What a connection has read last stays in gRPC's buffer until it reads more.
            for number in range(4):
                await other.ask(f"something else {number} " * 12)
