"""Routers that die under a request: the client sees a pause, and a bounded one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from outrider.errors import Code, Overloaded, Unavailable
from outrider.gateway.config import Failover
from outrider.gateway.routers.routers import LeasedRouters
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.metadata.store import MetadataStore
from outrider.protocol.identity import SPOKEN
from outrider.rpc.channel import create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2, generation_pb2, generation_pb2_grpc, router_pb2, worker_pb2
from prometheus_client import generate_latest

from tests.integration.gateway import scripted_router
from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.scripted_router import MODEL, Script, ScriptedRouter, refusing, round_of, routing, saying
from tests.ports import free_port
from tests.redis_server import EmbeddedServer

TEXT = "Once, and once only: äöü — every token arrives."
REQUEST = generation_pb2.GenerateRequest(
    model=MODEL, text="hi", options=generation_pb2.GenerationOptions(include_metrics=True)
)


def breaking_after(num_rounds: int, script: Script) -> Script:
    """Ends the call without a word, and without finishing."""

    async def broken(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        left = num_rounds
        async for response in script(request):
            if left == 0:
                return
            left -= 1
            yield response

    return broken


@pytest.fixture
def ids(tokenizer: ModelTokenizer) -> list[int]:
    return [*tokenizer.encode(TEXT), 2]


async def collect(address: str) -> tuple[str, list[int], generation_pb2.StreamGenerateResponse]:
    async with create_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.StreamGenerateRequest(request=REQUEST)
        messages = [message async for message in stub.StreamGenerate(request, timeout=30)]
    return "".join(m.text for m in messages), [i for m in messages for i in m.token_ids], messages[-1]


async def test_a_call_that_breaks_off_goes_on_at_the_other_router(gateway: OpenGateway, ids: list[int]) -> None:
    routers = [ScriptedRouter(breaking_after(3, saying(ids))) for _ in range(2)]
    async with (
        routing(routers[0]) as first,
        routing(routers[1]) as second,
        gateway(first, second, failover=Failover(max_moves=50)) as started,
    ):
        text, token_ids, last = await collect(started.grpc_address)
    assert (text, token_ids) == (TEXT, ids)
    assert (last.finish_reason, last.usage.completion_tokens) == ("stop", len(ids))
    assert last.metrics.speculative_decoding.num_steps == len(ids)
    resumed = [list(request.resume_token_ids) for router in routers for request in router.requests]
    assert sorted(resumed, key=len) == [ids[:at] for at in range(0, len(ids), 3)]
    assert all(router.requests for router in routers)


async def test_a_request_submitted_again_names_the_revision_its_answer_began_on(
    gateway: OpenGateway, ids: list[int]
) -> None:
    async def of_a_revision(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        first = True
        async for response in saying(ids)(request):
            if first:
                response.model_revision = request.resume_revision or "w/1"
            first = False
            yield response

    router = ScriptedRouter(breaking_after(len(ids) // 2 + 1, of_a_revision))
    async with routing(router) as address, gateway(address) as started:
        text, _, _ = await collect(started.grpc_address)
    assert text == TEXT
    assert [request.resume_revision for request in router.requests] == ["", "w/1"]


async def test_a_router_killed_in_mid_stream_costs_a_pause_and_no_token(
    gateway: OpenGateway, ids: list[int], tmp_path: Path
) -> None:
    port = free_port()
    (tmp_path / "tokenizer").write_bytes(scripted_router.tiny_tokenizer_bytes())
    arguments = [str(port), str(tmp_path / "tokenizer"), "0.02", *map(str, ids)]
    command = [sys.executable, scripted_router.__file__, *arguments]
    first = await asyncio.to_thread(start, command)
    second = None
    try:
        async with gateway(f"127.0.0.1:{port}", failover=Failover(window_s=15)) as started:
            answer = asyncio.create_task(collect(started.grpc_address))
            meter = started.core.metrics
            async with asyncio.timeout(60):
                while not meter.ttft.labels(MODEL)._sum.get():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            first.kill()
            # The same address, a new process: a restarted router.
            second = await asyncio.to_thread(start, command)
            text, token_ids, last = await answer
            moved = {"kind": "ongoing_request"}
            assert meter.registry.get_sample_value("outrider_gateway_router_failovers_total", moved)
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()
    assert (text, token_ids, last.finish_reason) == (TEXT, ids, "stop")


def start(command: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip()
    return process


async def test_when_no_router_goes_on_the_wait_is_bounded_and_ends_unavailable(
    gateway: OpenGateway, ids: list[int]
) -> None:
    async def once(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        if not request.resume_token_ids:
            yield round_of(ids[:2])

    router = ScriptedRouter(once)
    began_s = time.monotonic()
    async with routing(router) as address, gateway(address, failover=Failover(window_s=0.8)) as started:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(started.grpc_address)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "ROUTERS_FAILED")
    assert 0.8 <= time.monotonic() - began_s < 30
    # Pauses grow, so that a router in trouble is not hammered.
    assert len(router.requests) < 12


async def accepting(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
    yield router_pb2.RouteResponse(phase=router_pb2.ROUTE_PHASE_ACCEPTED)


@pytest.mark.parametrize("last", ["acceptance", "token"])
async def test_a_request_under_which_routers_break_is_not_passed_on_for_ever(
    gateway: OpenGateway, ids: list[int], last: str
) -> None:
    router = ScriptedRouter(accepting if last == "acceptance" else breaking_after(1, saying(ids)))
    async with routing(router) as address, gateway(address, failover=Failover(max_moves=3)) as started:
        with pytest.raises(grpc.aio.AioRpcError, match="calls to routers broke off") as caught:
            await collect(started.grpc_address)
    assert from_rpc_error(caught.value).reason == "ROUTERS_FAILED"
    assert len(router.requests) == 4


async def test_a_draining_router_sends_a_new_request_to_the_other(gateway: OpenGateway, ids: list[int]) -> None:
    draining = ScriptedRouter(refusing(Unavailable("going", reason="DRAINING")))
    staying = ScriptedRouter(saying(ids))
    async with routing(draining) as first, routing(staying) as second, gateway(first, second) as started:
        for _ in range(3):
            assert (await collect(started.grpc_address))[0] == TEXT
    # Once it has said so, it is left alone for a while.
    assert len(draining.requests) == 1


async def test_a_request_that_has_tokens_is_never_dropped_for_load(gateway: OpenGateway, ids: list[int]) -> None:
    router = ScriptedRouter(saying(ids))
    speak, calls = saying(ids), 0

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            raise Overloaded("full")
        async for response in breaking_after(5, speak)(request) if calls == 1 else speak(request):
            yield response

    router.script = script
    async with routing(router) as address, gateway(address) as started:
        text, token_ids, _ = await collect(started.grpc_address)
    assert (text, token_ids, calls) == (TEXT, ids, 4)


async def test_tokens_that_a_client_resumes_with_keep_it_from_no_refusal(gateway: OpenGateway, ids: list[int]) -> None:
    router = ScriptedRouter(refusing(Overloaded("full")))
    request = generation_pb2.StreamGenerateRequest(request=REQUEST)
    request.request.resume_token_ids.extend(ids[:3])
    async with routing(router) as address, gateway(address) as started, create_channel(started.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [message async for message in stub.StreamGenerate(request, timeout=30)]
    assert (refused.value.code(), len(router.requests)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)


@asynccontextmanager
async def leased(store: MetadataStore, name: str, address: str) -> AsyncIterator[None]:
    """A router of this name is registered there."""
    info = worker_pb2.WorkerInfo(protocol_version=SPOKEN.newest, role=worker_pb2.WORKER_ROLE_ROUTER, worker_id=name)
    async with store.register(info, address, worker_pb2.WorkerLoad):
        yield


@pytest.fixture
async def store(server: EmbeddedServer) -> AsyncIterator[MetadataStore]:
    async with MetadataStore.connect(server.url, call_timeout_s=2.0) as store:
        yield store


async def test_a_gateway_that_knows_no_router_waits_for_a_store_that_takes_its_time(
    server: EmbeddedServer, store: MetadataStore
) -> None:
    async with leased(store, "router-1", "127.0.0.1:7001"), MetadataStore.connect(server.url) as own:
        routers = LeasedRouters(own)
        os.kill(server.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.3, os.kill, server.pid, signal.SIGCONT)
        found = await asyncio.gather(*(routers.addresses() for _ in range(3)))
    assert found == [["127.0.0.1:7001"]] * 3


async def test_a_gateway_sends_nothing_new_to_a_router_that_is_cordoned(store: MetadataStore) -> None:
    async with leased(store, "router-1", "127.0.0.1:7001"), leased(store, "router-2", "127.0.0.1:7002"):
        await store.cordons.put(control_pb2.Cordon(worker_id="router-1"), "cordon worker")
        assert await LeasedRouters(store).addresses() == ["127.0.0.1:7002"]
        assert await store.cordons.remove("router-1", "test")
        assert await LeasedRouters(store).addresses() == ["127.0.0.1:7001", "127.0.0.1:7002"]


async def test_routers_are_found_by_their_leases_and_a_wait_for_one_is_no_failover(
    gateway: OpenGateway, server: EmbeddedServer, store: MetadataStore, ids: list[int]
) -> None:
    async with (
        routing(ScriptedRouter(saying(ids))) as address,
        leased(store, "router-1", address),
        gateway(metadata_url=server.url) as started,
    ):
        # As a control plane does.
        await store.tenants.keep_required()
        assert (await collect(started.grpc_address))[0] == TEXT
        assert worker_pb2.WORKER_ROLE_GATEWAY in {lease.info.role for lease in await store.workers()}
        await store.cordons.put(control_pb2.Cordon(worker_id="router-1"), "cordon worker")
        while await started.core.routers.every():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        answer = asyncio.create_task(collect(started.grpc_address))
        await asyncio.sleep(0.5)
        assert not answer.done()
        await store.cordons.remove("router-1", "test")
        text, _, _ = await answer
        counted = generate_latest(started.core.metrics.registry).decode()
    assert text == TEXT
    assert "outrider_gateway_router_failovers_total{" not in counted


async def test_a_request_that_routers_accept_outlives_more_restarts_than_the_window_has_time_for(
    gateway: OpenGateway, ids: list[int]
) -> None:
    async def waiting(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        yield router_pb2.RouteResponse(phase=router_pb2.ROUTE_PHASE_ACCEPTED)
        # It waits for a target when its router ends.
        await asyncio.sleep(0.1)
        if len(router.requests) > 4:
            yield router_pb2.RouteResponse(phase=router_pb2.ROUTE_PHASE_OPENED)
            async for response in saying(ids)(request):
                yield response

    router = ScriptedRouter(waiting)
    async with routing(router) as address, gateway(address, failover=Failover(window_s=0.05)) as started:
        text, _, last = await collect(started.grpc_address)
        waiting_now = started.core.metrics.registry.get_sample_value
    assert (text, len(router.requests)) == (TEXT, 5)
    assert last.metrics.queue_time_ms > 400
    assert waiting_now("outrider_gateway_requests_waiting", {"model_name": MODEL}) == 0
