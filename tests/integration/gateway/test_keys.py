"""API keys at both public ports, with real records."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai
import pytest
from outrider.errors import OutriderError
from outrider.gateway.http.errors import HttpError
from outrider.gateway.server import RunningGateway
from outrider.gateway.tenants.admission import RefusalPace
from outrider.metadata import MetadataStore
from outrider.rpc.access.roles import bearer
from outrider.rpc.channel import create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, router_pb2, sequence_pb2, tenants_pb2

from tests.integration.gateway.conftest import Says, add_key, events_of
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, round_of, until
from tests.redis_server import EmbeddedServer

# Key → (HTTP status, gRPC code, reason), as docs/operations.md has it.
MATRIX = {
    "good": (200, "OK", None),
    "": (401, "UNAUTHENTICATED", "API_KEY_MISSING"),
    "wrong": (401, "UNAUTHENTICATED", "INVALID_API_KEY"),
    "revoked": (401, "UNAUTHENTICATED", "INVALID_API_KEY"),
    "expired": (401, "UNAUTHENTICATED", "API_KEY_EXPIRED"),
    "metrics": (403, "PERMISSION_DENIED", "WRONG_SCOPE"),
    "other-model": (403, "PERMISSION_DENIED", "MODEL_NOT_ALLOWED"),
}


@pytest.fixture
async def store(server: EmbeddedServer) -> AsyncIterator[MetadataStore]:
    async with MetadataStore.connect(server.url) as store:
        yield store


@dataclass
class Served:
    gateway: RunningGateway
    router: ScriptedRouter

    async def http(self, key: str, path: str = "/v1/completions", stream: bool = False) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        base_url = f"http://{self.gateway.http_address}"
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60) as client:
            if path != "/v1/completions":
                return await client.get(path)
            return await client.post(path, json={"model": MODEL, "prompt": "a", "max_tokens": 8, "stream": stream})

    async def grpc(self, key: str) -> tuple[str, str | None]:
        async with create_channel(self.gateway.grpc_address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                await stub.Generate(generation_pb2.GenerateRequest(model=MODEL, text="a"), metadata=bearer(key))
            except grpc.aio.AioRpcError as error:
                return error.code().name, from_rpc_error(error).reason
            return "OK", None


@pytest.fixture
def options(server: EmbeddedServer) -> dict[str, Any]:
    return {"metadata_url": server.url}


@pytest.fixture
def served(running: RunningGateway, router: ScriptedRouter, says: Says) -> Served:
    says("Yes.")
    return Served(running, router)


async def fill(store: MetadataStore) -> None:
    tenants = [tenants_pb2.Tenant(name="acme"), tenants_pb2.Tenant(name="elsewhere", models=["another"])]
    await store.tenants.put(tenants, by="test")
    await add_key(store, "good")
    await add_key(store, "revoked")
    await store.tenants.revoke_key("key-revoked", by="test")
    await add_key(store, "expired", not_after_unix_s=int(time.time()) - 1)
    await add_key(store, "metrics", scopes=[tenants_pb2.KEY_SCOPE_METRICS])
    await add_key(store, "other-model", "elsewhere")


async def test_each_key_opens_what_the_matrix_says_over_http_and_grpc(served: Served, store: MetadataStore) -> None:
    await fill(store)
    for key, (status, code, reason) in MATRIX.items():
        response = await served.http(key)
        said = response.json()["error"]["code"] if response.is_error else None
        assert (response.status_code, said) == (status, reason and reason.lower()), key
        assert await served.grpc(key) == (code, reason), key
    assert [request.tenant for request in served.router.requests] == ["acme", "acme"]
    assert (await served.http("")).headers["www-authenticate"] == "Bearer"


async def test_the_stock_client_works_with_its_key_and_says_which_is_wrong(
    served: Served, store: MetadataStore
) -> None:
    await fill(store)
    base_url = f"http://{served.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="good") as client:
        answer = await client.completions.create(model=MODEL, prompt="a", max_tokens=8)
        assert answer.choices[0].text == "Yes."
        assert [model.id for model in (await client.models.list()).data] == [MODEL]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model=MODEL, prompt="a", max_tokens=8)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="other-model") as client:
        assert (await client.models.list()).data == []
        with pytest.raises(openai.PermissionDeniedError):
            await client.models.retrieve(MODEL)


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_a_key_opens_anthropics_api_under_both_of_its_names(
    served: Served, store: MetadataStore, header: str
) -> None:
    await fill(store)
    asked = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}
    base_url = f"http://{served.gateway.http_address}/v1"
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        for key, (status, _, reason) in MATRIX.items():
            headers = {header: f"Bearer {key}" if header == "authorization" else key} if key else {}
            for path in ("/messages", "/messages/count_tokens"):
                answer = await client.post(path, json=asked, headers=headers)
                assert answer.status_code == status, (key, answer.text)
                if reason is not None:
                    kind = {401: "authentication_error", 403: "permission_error"}[status]
                    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert {request.tenant for request in served.router.requests} == {"acme"}


async def test_health_wants_no_key(served: Served, store: MetadataStore) -> None:
    await fill(store)
    # Until then it is not ready.
    await until(lambda: not served.gateway.core.problem)
    assert (await served.http("", "/health")).status_code == 200


async def test_without_keys_everybody_is_the_default_tenant(served: Served, store: MetadataStore) -> None:
    # As a control plane does.
    await store.tenants.keep_required()
    assert (await served.http("")).status_code == 200
    assert await served.grpc("whatever") == ("OK", None)
    assert {request.tenant for request in served.router.requests} == {"default"}


async def test_routers_hear_a_tenants_weight_and_how_long_its_answers_are(served: Served, store: MetadataStore) -> None:
    await store.tenants.put([tenants_pb2.Tenant(name="acme", weight=2)], by="test")
    await add_key(store, "good")
    # A mean that starts high, against the eight that are asked for.
    assert (await served.http("good")).status_code == 200
    served.gateway.core.quotas._account("acme").mean.mean = 3.0
    assert (await served.http("good")).status_code == 200
    requests = served.router.requests
    assert [(request.weight, request.expected_tokens) for request in requests] == [(2, 8), (2, 3)]


async def test_a_known_key_works_on_while_the_store_is_away(
    served: Served, store: MetadataStore, server: EmbeddedServer
) -> None:
    await fill(store)
    assert (await served.http("good")).status_code == 200
    server.stop()
    await asyncio.sleep(0.1)
    assert (await served.http("good")).status_code == 200
    assert (await served.http("never seen")).status_code == 503


async def test_a_tenant_over_its_quota_gets_429_and_the_stock_client_tries_again(
    served: Served, store: MetadataStore
) -> None:
    quota = tenants_pb2.Quota(requests_per_second=2)
    await store.tenants.put([tenants_pb2.Tenant(name="acme", quota=quota)], by="test")
    await add_key(store, "good")
    responses = [await served.http("good") for _ in range(4)]
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(refused.headers["retry-after-ms"]) <= 500
    assert (await served.grpc("good"))[0] in ("OK", "RESOURCE_EXHAUSTED")
    async with openai.AsyncOpenAI(base_url=f"http://{served.gateway.http_address}/v1", api_key="good") as client:
        answers = [await client.completions.create(model=MODEL, prompt="a", max_tokens=8) for _ in range(3)]
    assert [answer.choices[0].text for answer in answers] == ["Yes."] * 3


async def test_who_waits_for_its_quota_has_no_places(served: Served, store: MetadataStore) -> None:
    quota = tenants_pb2.Quota(concurrent_requests=2)
    await store.tenants.put([tenants_pb2.Tenant(name="greedy", quota=quota), tenants_pb2.Tenant(name="acme")], by="t")
    await add_key(store, "greedy", "greedy")
    await add_key(store, "good")
    core = served.gateway.core
    async with core.quotas._account("greedy").taking:
        asked = [asyncio.create_task(served.http("greedy")) for _ in range(20)]
        await until(lambda: core.quotas._account("greedy").running == 20)
        assert core.admission.running == 0
        assert (await served.http("good")).status_code == 200
    assert {response.status_code for response in await asyncio.gather(*asked)} <= {200, 429}


async def test_every_refusal_is_paced_by_tenant_or_by_address_where_no_key_says_whose_it_is(
    served: Served, store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store)
    paced: list[str] = []
    monkeypatch.setattr(RefusalPace, "wait_s", lambda self, caller, now_s: paced.append(caller) or 0.0)
    for key, caller in {"wrong": " 127.0.0.1", "other-model": "elsewhere", "good": ""}.items():
        await served.http(key)
        await served.grpc(key)
        assert paced == ([caller, caller.replace(" ", " ipv4:")] if caller else []), key
        paced.clear()
    await served.http("good", "/v1/models/none")
    assert paced == ["acme"]


async def test_a_refusal_leaves_no_error_to_the_garbage_collector(
    served: Served, store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of refusals in a closed loop it would find so many that a collection stops all streams for half a second."""
    monkeypatch.setattr(RefusalPace, "wait_s", lambda self, caller, now_s: 0.0)
    quota = tenants_pb2.Quota(tokens_per_minute=1)
    await store.tenants.put([tenants_pb2.Tenant(name="acme", quota=quota)], by="t")
    await add_key(store, "good")
    gc.collect()
    gc.disable()
    try:
        answers = [(await served.http("good")).status_code for _ in range(5)]
        answers += [(await served.grpc("good"))[0] for _ in range(5)]
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [one for one in gc.garbage if isinstance(one, OutriderError | HttpError)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert {429, "RESOURCE_EXHAUSTED"} <= set(answers)
    assert left == []


async def test_a_revoked_key_ends_its_streams_over_http_and_grpc_and_no_others(
    served: Served, store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.rpc.access.guard.RECHECK_S", 0.1)
    monkeypatch.setattr("outrider.gateway.tenants.auth._FRESH_S", 0.1)
    await fill(store)
    await add_key(store, "short")
    going_on = asyncio.Event()

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        yield round_of([40])
        await going_on.wait()
        yield round_of([2], finish_reason=sequence_pb2.FINISH_REASON_STOP)

    served.router.script = script
    running = [asyncio.create_task(served.http(key, stream=True)) for key in ("short", "good")]
    over_grpc = asyncio.create_task(served.grpc("short"))
    await until(lambda: served.router.num_running == 3)
    await store.tenants.revoke_key("key-short", by="test")
    ended = await running[0]
    assert json.loads(events_of(ended.text)[-1])["error"]["code"] == "invalid_api_key"
    assert await over_grpc == ("UNAUTHENTICATED", "INVALID_API_KEY")
    await until(lambda: served.router.num_running == 1)
    going_on.set()
    assert (await running[1]).text.endswith("data: [DONE]\n\n")
