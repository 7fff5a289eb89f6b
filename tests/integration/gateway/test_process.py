"""The gateway as a process of its own: start, SIGTERM, exit codes, and what its logs keep to themselves."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import openai
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import router_pb2

from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, routing, saying

TEXT = "A stream that takes a while."
CANARY = "canary-7f3a"


@asynccontextmanager
async def process(
    *arguments: str, under: Sequence[str] = (), module: str = "outrider.gateway"
) -> AsyncIterator[Process]:
    """`under` comes before the command: a program that runs it."""
    flags = ("--listen-grpc", "127.0.0.1:0", "--log-format", "json", *arguments)
    child = await asyncio.create_subprocess_exec(*under, sys.executable, "-m", module, *flags, stderr=PIPE)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def serving_at(child: Process) -> str:
    """The HTTP address from the log line that says so."""
    assert child.stderr is not None
    async for line in child.stderr:
        message = json.loads(line)["message"] if line.startswith(b"{") else ""
        if message.startswith("serving"):
            return str(message.rpartition(" ")[2])
    raise AssertionError("it ended without serving")


async def test_sigterm_finishes_the_running_stream_and_exits_0(tokenizer: ModelTokenizer) -> None:
    ids = [*tokenizer.encode(TEXT), 2]
    going_on = asyncio.Event()

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        async for response in saying(ids)(request):
            yield response
            await going_on.wait()

    router = ScriptedRouter(script)
    async with (
        routing(router) as address,
        process("--listen-http", "127.0.0.1:0", "--router", address) as child,
    ):
        http_address = await serving_at(child)
        async with openai.AsyncOpenAI(base_url=f"http://{http_address}/v1", api_key="none") as client:
            stream = await client.completions.create(model=MODEL, prompt=CANARY, max_tokens=100, stream=True)
            text = (await anext(aiter(stream))).choices[0].text
            child.send_signal(signal.SIGTERM)
            async with httpx.AsyncClient() as http:
                while (await http.get(f"http://{http_address}/health")).status_code != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            going_on.set()
            text += "".join([chunk.choices[0].text async for chunk in stream])
        assert await asyncio.wait_for(child.wait(), 45) == 0
        assert child.stderr is not None
        log = await child.stderr.read()
    assert text == TEXT
    assert CANARY.encode() not in log


async def test_a_taken_port_is_one_line_and_exit_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with process("--listen-http", address, "--router", "127.0.0.1:1") as child:
            _, log = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 1
    assert f"cannot listen on {address}".encode() in log
    assert b"Traceback" not in log
