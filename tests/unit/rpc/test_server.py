from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from outrider.errors import DeadlineExceeded
from outrider.rpc.channel import create_channel, remaining_s
from outrider.rpc.server import ServerLife, bind, create_server, serving
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2

SERVICE = "outrider.rpc.v1.GenerationService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def running() -> AsyncIterator[tuple[ServerLife, grpc.aio.Channel]]:
    server = create_server()
    async with serving(server, "127.0.0.1:0", services=[SERVICE]) as life, create_channel(life.address) as channel:
        yield life, channel


async def check(channel: grpc.aio.Channel, service: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return response.status


async def test_health_is_serving_only_between_ready_and_drain() -> None:
    async with running() as (life, channel):
        seen = []
        for change in (None, life.ready, life.drain, life.ready):
            if change is not None:
                await change()
            seen.append([await check(channel, name) for name in ("", SERVICE)])
    assert seen == [[NOT_SERVING] * 2, [SERVING] * 2, [NOT_SERVING] * 2, [NOT_SERVING] * 2]
    assert life.draining.is_set()


async def test_health_of_a_service_that_is_not_there_is_not_found(call_error: Callable[..., Any]) -> None:
    async with running() as (_, channel):
        error = await call_error(check(channel, "no.such.Service"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_under_both_its_names(version: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="*")

    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield request

    async with running() as (_, channel):
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(requests())
        names = [
            service.name for response in [await call.read()] for service in response.list_services_response.service
        ]
    assert {SERVICE, "grpc.health.v1.Health"} <= set(names)


SILENT = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
for _ in range(300):
    held.append(socket.socket())
    held[-1].setblocking(False)
    held[-1].connect_ex(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.read()
"""


async def test_silent_sockets_that_take_all_files_cost_nobody_a_connection() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, limits[1]))
    try:
        # gRPC itself would wait for their first bytes for ever.
        server = create_server(more=[("grpc.server_handshake_timeout_ms", 10**9)])
        async with serving(server, "127.0.0.1:0", services=[SERVICE]) as life, create_channel(life.address) as before:
            await check(before, "")
            command = sys.executable, "-c", SILENT, life.address.rpartition(":")[2]
            pipe = asyncio.subprocess.PIPE
            silent = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            assert silent.stdin is not None and silent.stdout is not None
            await silent.stdout.readline()
            async with asyncio.timeout(60), create_channel(life.address) as late:
                health = health_pb2_grpc.HealthStub(late)
                await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            await check(before, "")
            silent.stdin.close()
            await silent.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_watch_is_told_of_changes_also_after_another_has_ended_and_lasts_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch, call_error: Callable[..., Any]
) -> None:
    monkeypatch.setattr("outrider.rpc.health.MAX_WATCHES", 3)
    async with running() as (life, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = []
        for _ in range(5):
            watches.append(stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)))
            assert (await watches[-1].read()).status == NOT_SERVING
        for over in watches[:2]:
            error = await call_error(over.read())
            assert from_rpc_error(error).reason == "WATCH_ENDED"
        await life.ready()
        for open_watch in watches[2:]:
            assert (await open_watch.read()).status == SERVING


async def test_a_watch_does_not_last_for_ever(monkeypatch: pytest.MonkeyPatch, call_error: Callable[..., Any]) -> None:
    monkeypatch.setattr("outrider.rpc.health.MAX_WATCH_S", 0.05)
    async with running() as (_, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="no.such"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert (await call_error(watch.read())).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_that_is_taken_is_an_error_not_a_second_listener() -> None:
    async with serving(create_server(), "127.0.0.1:0", services=[SERVICE]) as life:
        with pytest.raises(OSError, match=f"cannot listen on {life.address}: it is in use"):
            bind(create_server(), life.address)


@pytest.mark.parametrize("address", ["", "8080", ":8080", "localhost:", "localhost:http", "127.0.0.1:70000"])
async def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(OSError, match="HOST:PORT"):
        bind(create_server(), address)


async def test_a_message_at_the_limit_passes_and_one_above_is_refused_without_harm(
    serve: Any, call_error: Callable[..., Any]
) -> None:
    async def echo(request: Any, context: Any) -> Any:
        return generation_pb2.GenerateResponse(id=str(len(request.text)))

    limit = 100_000
    overhead = generation_pb2.GenerateRequest(text="x" * limit).ByteSize() - limit
    async with serve(unary=echo, max_message_bytes=limit) as (stub, _):
        fits = generation_pb2.GenerateRequest(text="x" * (limit - overhead))
        assert (await stub.Generate(fits)).id == str(limit - overhead)
        error = await call_error(stub.Generate(generation_pb2.GenerateRequest(text="x" * (limit - overhead + 1))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Generate(fits)).id == str(limit - overhead)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_message_above_the_limit_is_counted(streaming: bool) -> None:
    size, counted = 4 << 20, Counter[tuple[str, str]]()

    async def answer(request: Any, context: Any) -> bytes:
        return str(len(request)).encode()

    async def answer_stream(requests: Any, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(str(len(request)).encode())

    server = create_server(max_message_bytes=size, on_refused=lambda *why: counted.update([why]))
    name = "StreamGenerate" if streaming else "Generate"
    make = grpc.stream_stream_rpc_method_handler if streaming else grpc.unary_unary_rpc_method_handler
    handler = make(answer_stream if streaming else answer, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {name: handler}),))
    async with serving(server, "127.0.0.1:0", services=[]) as life, create_channel(life.address) as channel:
        for beyond in (-1, 0, 1):
            data, method = bytes(size + beyond), f"/{SERVICE}/{name}"
            call: Any = channel.stream_stream(method)([data]) if streaming else channel.unary_unary(method)(data)
            if beyond <= 0:
                assert await (call.read() if streaming else call) == str(len(data)).encode()
                continue
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await call.details() == f"a message of {len(data)} bytes; at most {size}"
    assert counted == {(f"/{SERVICE}/{name}", "MESSAGE_TOO_LARGE"): 1}


async def test_a_call_made_for_a_call_gets_what_is_left_of_its_deadline(serve: Any, request_message: Any) -> None:
    left: list[float | None] = []

    async def note(request: Any, context: Any) -> Any:
        left.append(remaining_s(context, margin_s=0.1))
        return generation_pb2.GenerateResponse()

    async with serve(unary=note) as (stub, _):
        await stub.Generate(request_message, timeout=5)
        await stub.Generate(request_message)
    assert left[0] is not None and 4 < left[0] < 4.95  # gRPC rounds the deadline on its way
    assert left[1] is None


async def test_a_deadline_with_nothing_left_is_an_error_of_its_own(
    serve: Any, request_message: Any, call_error: Callable[..., Any]
) -> None:
    async def note(request: Any, context: Any) -> Any:
        remaining_s(context, margin_s=10)

    async with serve(unary=note) as (stub, _):
        error = from_rpc_error(await call_error(stub.Generate(request_message, timeout=5)))
    assert isinstance(error, DeadlineExceeded)
    assert error.reason == "DEADLINE_EXCEEDED"


WORKER = """
import asyncio, sys
from outrider.rpc.server import STOP_SIGNALS, create_server, serving

async def main():
    async with serving(create_server(), "127.0.0.1:0", services=["a.B"], signals=STOP_SIGNALS) as life:
        await life.ready()
        print("ready", flush=True)
        await life.draining.wait()
        print("draining", life.health.serving, flush=True)
        if sys.argv[1] == "hang":
            await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_starts_the_drain_and_the_process_ends_with_zero(number: signal.Signals) -> None:
    process = await start_worker("leave")
    process.send_signal(number)
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert out.decode().split() == ["draining", "False"]
    assert process.returncode == 0


async def test_a_second_signal_ends_a_drain_that_hangs() -> None:
    process = await start_worker("hang")
    assert process.stdout is not None
    process.terminate()
    assert await process.stdout.readline() == b"draining False\n"
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 128 + signal.SIGTERM


async def start_worker(behaviour: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, behaviour, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
    return process


async def test_no_message_of_a_call_outlives_it(serve: Any) -> None:
    async def unary(request: Any, context: Any) -> Any:
        return generation_pb2.GenerateResponse()

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.StreamGenerateResponse()

    def kept() -> Counter[str]:
        gc.collect()
        return Counter(type(one).__name__ for one in gc.get_objects())

    before = kept()
    async with serve(unary=unary, stream=stream) as (stub, _):
        for _ in range(100):
            await stub.Generate(generation_pb2.GenerateRequest())
            async for _ in stub.StreamGenerate(generation_pb2.StreamGenerateRequest()):
                pass
    await asyncio.sleep(0.1)
    more = kept() - before
    assert more["GenerateRequest"] < 10 and more["StreamGenerateRequest"] < 10
