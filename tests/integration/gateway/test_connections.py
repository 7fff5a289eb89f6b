"""What a client may do to the gateway's connections without harm to others."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import httpx
import pytest
from outrider.gateway.config import GatewayLimits
from outrider.gateway.server import RunningGateway
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, router_pb2, sequence_pb2

from tests.certificates import Cluster
from tests.integration.gateway import raw_http2
from tests.integration.gateway.conftest import OpenGateway, Stub
from tests.integration.gateway.scripted_router import MODEL, VOCAB, ScriptedRouter, round_of, routing, saying, until
from tests.integration.gateway.test_process import process, serving_at

GENERATE = "/outrider.rpc.v1.GenerationService/Generate"
STREAM = "/outrider.rpc.v1.GenerationService/StreamGenerate"
CHUNKED = b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LOST = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
# Of the tests' limits; nothing here waits for as long as the defaults are.
SOON = GatewayLimits(header_timeout_s=0.3, idle_timeout_s=0.3, body_timeout_s=0.3, send_timeout_s=0.3)
AT_ONCE_S = 5.0


async def connect(address: str, receive_buffer: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    raw = socket.socket()
    raw.setblocking(False)
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    return await asyncio.open_connection(sock=raw)


async def trickle(writer: asyncio.StreamWriter, opening: bytes, more: bytes) -> None:
    """`opening` at once, and `more` byte by byte, again and again, until the other end is gone."""
    writer.write(opening)
    for byte in itertools.cycle(more):
        await asyncio.sleep(0.05)
        try:
            writer.write(bytes([byte]))
            await writer.drain()
        except ConnectionError:
            return


async def rest_of(reader: asyncio.StreamReader, timeout_s: float = AT_ONCE_S) -> bytes:
    """What comes up to the end of the connection, which has to come. A byte on its way to a server that closes makes
    that end a reset: what came before it counts."""
    came = bytearray()
    async with asyncio.timeout(timeout_s):
        with suppress(ConnectionError):
            while part := await reader.read(65536):
                came += part
    return bytes(came)


async def serves(http_address: str) -> bool:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"http://{http_address}/v1/completions", json={"model": MODEL, "prompt": "a"})
    return answer.status_code == 200


# What is sent at once, what then follows byte by byte without end, and the statuses of what is answered.
SLOW: dict[str, tuple[bytes, bytes, list[bytes]]] = {
    "nothing": (b"", b"", []),
    "half a head": (HEAD, b"", [b"408"]),
    "a head without end": (b"GET /health HTTP/1.1\r\n", b"A: b\r\n", [b"408"]),
    "rest after an answer": (LOST, b"", [b"404"]),
    "a second head without end": (LOST + b"GET /health HTTP/1.1\r\n", b"A: b\r\n", [b"404", b"408"]),
    "a body without end": (HEAD + CHUNKED, b"1\r\n \r\n", [b"408"]),
    "a body without end that nobody wants": (b"POST /nowhere HTTP/1.1\r\n" + CHUNKED, b"1\r\n \r\n", [b"404"]),
}


@pytest.mark.parametrize("kind", SLOW)
async def test_a_connection_that_only_costs_time_is_closed(
    gateway: OpenGateway, router: ScriptedRouter, kind: str
) -> None:
    opening, more, statuses = SLOW[kind]
    async with routing(router) as address, gateway(address, limits=SOON) as running:
        reader, writer = await connect(running.http_address)
        sending = asyncio.create_task(trickle(writer, opening, more))
        answer = await rest_of(reader)
        sending.cancel()
        assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == statuses
        assert await serves(running.http_address)


# Heads whose end, or whose body's end, a proxy and a server may see in different places (RFC 9112, 2.2, 5.2, 6.1).
AMBIGUOUS: dict[str, bytes] = {
    "length and chunked": HEAD + b"Host: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": HEAD.replace(b"/1.1", b"/1.0") + CHUNKED + b"0\r\n\r\n",
    "two lengths": HEAD + b"Host: x\r\nContent-Length: 5\r\nContent-Length: 0\r\n\r\n",
    "line feeds alone": b"GET /health HTTP/1.1\nHost: x\n\n",
    "one line feed alone": b"GET /health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "an end of a line feed alone": b"GET /health HTTP/1.1\r\nHost: x\r\n\n",
    "a folded field": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c: d\r\n\r\n",
    "a field folded by a tab": b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\r\n\tchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": HEAD + b"Host: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a line feed alone in a trailer": HEAD + CHUNKED + b"0\r\nA: b\n\r\n",
    "a folded trailer": HEAD + CHUNKED + b"0\r\nA: b\r\n c\r\n\r\n",
    "a line feed alone after a chunk's size": HEAD + CHUNKED + b"0\n\r\n",
}


async def test_a_request_whose_end_is_ambiguous_is_refused_and_hides_no_other(running: RunningGateway) -> None:
    for kind, ambiguous in AMBIGUOUS.items():
        reader, writer = await connect(running.http_address)
        writer.write(ambiguous + LOST)
        assert re.findall(rb"HTTP/1\.1 (\d+)", await rest_of(reader)) == [b"400"], kind
        writer.close()


async def test_of_too_many_connections_the_one_that_rested_longest_makes_room(
    gateway: OpenGateway, router: ScriptedRouter
) -> None:
    release = asyncio.Event()

    async def waiting(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        await release.wait()
        yield round_of([40, 2], finish_reason=sequence_pb2.FINISH_REASON_STOP)

    router.script = waiting
    async with routing(router) as address, gateway(address, limits=GatewayLimits(max_connections=5)) as running:
        asking = asyncio.create_task(serves(running.http_address))
        await until(lambda: router.num_running == 1)
        waiting = [await connect(running.http_address) for _ in range(12)]
        # The one under way is left alone, the others go in the order in which they came.
        for reader, _ in waiting[:8]:
            assert await rest_of(reader) == b""
        assert not any(reader.at_eof() for reader, _ in waiting[8:])
        release.set()
        assert await asking
        assert await serves(running.http_address)


async def test_a_stream_that_ends_during_the_drain_closes_its_connection(
    gateway: OpenGateway, router: ScriptedRouter
) -> None:
    ends = {40: asyncio.Event(), 41: asyncio.Event()}

    async def held(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        [prompt] = request.prompt_token_ids
        yield round_of([42])
        await ends[prompt].wait()
        yield round_of([2], finish_reason=sequence_pb2.FINISH_REASON_STOP)

    router.script = held
    async with routing(router) as address, AsyncExitStack() as stack:
        running = await stack.enter_async_context(gateway(address, drain_timeout_s=60))
        connections = []
        for prompt in ends:
            reader, writer = await connect(running.http_address)
            body = json.dumps({"model": MODEL, "prompt": [prompt], "stream": True}).encode()
            writer.write(HEAD + b"Host: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await reader.readuntil(b"data: ")
            connections.append((reader, writer))
        leaving = asyncio.create_task(stack.aclose())
        await until(lambda: running.core.admission.draining)
        for (reader, _), end in zip(connections, ends.values(), strict=True):
            end.set()
            # The second one still holds the gateway while the first one's connection ends.
            assert (await rest_of(reader)).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        await leaving


async def test_a_connection_beyond_busy_ones_is_told_so(gateway: OpenGateway, router: ScriptedRouter) -> None:
    router.script = saying([40, 41, 42, 2], pause_s=0.3)
    async with routing(router) as address, gateway(address, limits=GatewayLimits(max_connections=2)) as running:
        asking = [asyncio.create_task(serves(running.http_address)) for _ in range(2)]
        await until(lambda: router.num_running == 2)
        reader, _ = await connect(running.http_address)
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"Retry-After: 1\r\n" in answer
        # Its path is not known: a client of OpenAI or of Anthropic may have asked.
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert all(await asyncio.gather(*asking))


def endless(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
    async def rounds() -> AsyncIterator[router_pb2.RouteResponse]:
        while True:
            # The longest token there is: eleven characters.
            yield round_of([VOCAB - 1] * 200)
            await asyncio.sleep(0)

    return rounds()


async def test_a_client_that_reads_nothing_loses_its_answer_and_its_place(
    gateway: OpenGateway, router: ScriptedRouter
) -> None:
    router.script, router.max_context_len = endless, 1 << 30
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 1 << 29}).encode()
    async with routing(router) as address, gateway(address, limits=SOON) as running:
        reader, writer = await connect(running.http_address, receive_buffer=4096)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"Host: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: router.num_running == 1)
        await until(lambda: router.num_running == 0 and running.core.admission.running == 0, 30)


async def test_a_grpc_client_that_reads_nothing_loses_its_answer_and_its_place(
    gateway: OpenGateway, router: ScriptedRouter
) -> None:
    router.script, router.max_context_len = endless, 1 << 30
    options = generation_pb2.GenerationOptions(max_tokens=1 << 29)
    request = generation_pb2.GenerateRequest(model=MODEL, text="a", options=options)
    message = generation_pb2.StreamGenerateRequest(request=request).SerializeToString()
    async with routing(router) as address, gateway(address, limits=SOON) as running:
        _, writer = await raw_http2.connect(running.grpc_address)
        writer.write(raw_http2.frame(raw_http2.HEADERS, raw_http2.END_HEADERS, 1, raw_http2.call_head(STREAM)))
        writer.write(raw_http2.frame(raw_http2.DATA, raw_http2.END_STREAM, 1, raw_http2.call_message(message)))
        await until(lambda: router.num_running == 1)
        await until(lambda: router.num_running == 0 and running.core.admission.running == 0, 30)


async def test_a_grpc_connection_that_says_nothing_is_closed(gateway: OpenGateway, router: ScriptedRouter) -> None:
    async with routing(router) as address, gateway(address, limits=SOON) as running:
        silent, _ = await connect(running.grpc_address)
        idle, _ = await raw_http2.connect(running.grpc_address)
        for reader in (silent, idle):
            await rest_of(reader)
            assert reader.at_eof()


async def test_a_grpc_port_takes_only_so_many_connections(gateway: OpenGateway, router: ScriptedRouter) -> None:
    async with routing(router) as address, gateway(address, limits=GatewayLimits(max_connections=3)) as running:
        kept = [await raw_http2.connect(running.grpc_address) for _ in range(3)]
        for reader, _ in kept:
            assert await reader.read(1)
        reader, _ = await connect(running.grpc_address)
        assert await rest_of(reader) == b""
        assert not any(reader.at_eof() for reader, _ in kept)


async def generate(stub: Stub) -> str:
    try:
        await stub.Generate(generation_pb2.GenerateRequest(model=MODEL, text="hi"), timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.slow
async def test_a_burst_of_calls_is_answered_call_by_call(gateway: OpenGateway, router: ScriptedRouter) -> None:
    """On one connection they wait for their turn; on many, what exceeds the gateway's limit is told so."""
    async with (
        routing(router) as address,
        gateway(address, limits=GatewayLimits(max_running=200, max_streams=128)) as running,
    ):
        async with create_channel(running.grpc_address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert await generate(stub) == "OK"
            ends = Counter(await asyncio.gather(*(generate(stub) for _ in range(1500))))
        assert ends == {"OK": 1500}
        async with AsyncExitStack() as channels:
            own = [("grpc.use_local_subchannel_pool", 1)]
            opened = [
                await channels.enter_async_context(grpc.aio.insecure_channel(running.grpc_address, options=own))
                for _ in range(12)
            ]
            stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in opened]
            ends = Counter(await asyncio.gather(*(generate(stub) for stub in stubs for _ in range(125))))
        assert set(ends) <= {"OK", "RESOURCE_EXHAUSTED"}
        assert ends["OK"] >= 200


async def test_a_client_that_resets_its_calls_ends_nobody_elses(running: RunningGateway, stub: Stub) -> None:
    head = raw_http2.call_head(GENERATE)

    async def reset(address: str) -> None:
        for _ in range(4):
            _, writer = await raw_http2.connect(address)
            for stream in range(1, 10_000, 2):
                writer.write(raw_http2.frame(raw_http2.HEADERS, raw_http2.END_HEADERS, stream, head))
                writer.write(raw_http2.frame(raw_http2.RST_STREAM, 0, stream, raw_http2.CANCEL))
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

    resetting = asyncio.create_task(reset(running.grpc_address))
    ends: Counter[str] = Counter()
    while not resetting.done() or ends.total() < 50:
        ends.update(await asyncio.gather(*(generate(stub) for _ in range(5))))
    await resetting
    assert set(ends) == {"OK"}


@pytest.mark.slow
async def test_idle_sockets_do_not_stop_a_gateway_that_may_open_few_files(router: ScriptedRouter) -> None:
    flags, under_limit = ("--listen-http", "127.0.0.1:0"), ("prlimit", "--nofile=256:256")
    async with routing(router) as address, process(*flags, "--router", address, under=under_limit) as child:
        http_address = await serving_at(child)
        idle = [await connect(http_address) for _ in range(400)]
        assert await serves(http_address)
        child.terminate()
        _, log = await child.communicate()
        assert len(idle) == 400
    assert log.count(b"\n") < 20
    assert b"socket.accept" not in log


async def test_a_client_that_begins_no_handshake_is_let_go_of_in_time_and_others_are_served(
    router: ScriptedRouter, gateway: OpenGateway, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path)
    public = cluster.issue("public", "127.0.0.1")
    trusting = ssl.create_default_context(cafile=public.authority)
    async with (
        routing(router) as address,
        gateway(address, limits=SOON, public_tls_dir=str(public.directory)) as running,
        httpx.AsyncClient(verify=trusting) as client,
    ):
        for port in (running.http_address, running.grpc_address):
            host, _, number = port.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(number))
            await asyncio.wait_for(reader.read(), 60)
            writer.close()
        assert (await client.get(f"https://{running.http_address}/health")).status_code == 200
