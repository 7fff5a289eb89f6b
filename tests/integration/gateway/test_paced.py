"""Paced streams on every road: the same text, in frames of one size, also where the answer fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from outrider.errors import InvalidRequest
from outrider.gateway.generation.pacing import FRAME_BYTES
from outrider.gateway.http.sse import OBFUSCATED_BYTES
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.metadata import MetadataStore
from outrider.rpc.v1 import generation_pb2, router_pb2, tenants_pb2

from tests.integration.gateway.conftest import Stub, events_of
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, round_of, saying
from tests.redis_server import EmbeddedServer

TEXT = "What comes at an even beat tells nothing of how it was guessed."
CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "a"}]
REQUEST = generation_pb2.StreamGenerateRequest(request=generation_pb2.GenerateRequest(model=MODEL, text="a"))
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 200},
    CHAT: {"messages": MESSAGES, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "a"},
}


@pytest.fixture
def router(tokenizer: ModelTokenizer) -> ScriptedRouter:
    return ScriptedRouter(saying([*tokenizer.encode(TEXT), 2], size=5, pause_s=0.002), max_context_len=4096)


@pytest.fixture
async def options(server: EmbeddedServer) -> dict[str, Any]:
    """Of a gateway whose tenant has its streams paced."""
    async with MetadataStore.connect(server.url, call_timeout_s=2.0) as store:
        record = tenants_pb2.Tenant(name="default", pacing=tenants_pb2.PACING_CONSTANT)
        await store.tenants.put([record], by="test")
        await store.tenants.keep_required()
    return {"metadata_url": server.url}


async def body_of(http: httpx.AsyncClient, path: str) -> bytes:
    return (await http.post(path, json={"model": MODEL, "stream": True, **BODIES[path]})).content


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_over_http_is_whole_frames_of_its_events(http: httpx.AsyncClient, path: str) -> None:
    body = await body_of(http, path)
    assert len(body) % FRAME_BYTES == 0
    events = list(map(json.loads, events_of(body.decode())))
    if path == "/v1/responses":
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    else:
        assert body.rpartition(b"data: ")[2].startswith(b"[DONE]")
        choices = [choice for each in events for choice in each["choices"]]
        assert "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices) == TEXT


@pytest.mark.parametrize("options", [{}])
async def test_chunks_with_obfuscation_have_a_multiple_of_a_size_and_openais_client_reads_them(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_obfuscation": True}}
    found = await http.post(CHAT, json={"model": MODEL, **BODIES[CHAT], **asked})
    events = [each for each in found.text.split("\n\n") if each.startswith("data: {")]
    padded = [each for each in events if "obfuscation" in each]
    assert {(len(each.encode()) + 2) % OBFUSCATED_BYTES for each in padded} == {0}
    assert len(padded) >= len(events) - 2
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    assert "".join([part.choices[0].delta.content or "" async for part in stream if part.choices]) == TEXT


async def test_openais_client_reads_it(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=2)
    texts = ["", ""]
    async for part in stream:
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [TEXT, TEXT]


async def test_messages_over_grpc_have_one_size(stub: Stub) -> None:
    call = stub.StreamGenerate(REQUEST, timeout=30)
    messages = [message async for message in call]
    assert {message.ByteSize() for message in messages} == {FRAME_BYTES}
    assert "".join(message.text for message in messages) == TEXT
    assert messages[-1].finish_reason == "stop" and not any(message.num_accepted for message in messages)


async def test_what_fails_before_and_after_the_first_token_is_told_as_ever(
    http: httpx.AsyncClient, stub: Stub, router: ScriptedRouter
) -> None:
    async def fails(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        if router.script is late:
            yield round_of([40, 41])
        raise InvalidRequest("x", "no room")

    async def late(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        async for each in fails(request):
            yield each

    router.script = fails
    assert json.loads(await body_of(http, CHAT))["error"]["message"] == "x: no room"
    router.script = late
    body = await body_of(http, CHAT)
    assert len(body) % FRAME_BYTES == 0 and b'"error"' in body
    said = list[int]()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for each in stub.StreamGenerate(REQUEST, timeout=30):
            said += each.token_ids
    assert "no room" in str(failed.value.details()) and said == [40, 41]
