"""The caller's trace goes on through the gateway, with spans of the gateway's own where they are wanted."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from outrider.errors import OutriderError, Overloaded
from outrider.gateway.server import RunningGateway
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2
from outrider.telemetry.context import NO_CONTEXT, TraceContext
from outrider.telemetry.tracing import Tracing

from tests.integration.gateway.conftest import Stub
from tests.integration.gateway.scripted_router import MODEL, VOCAB, ScriptedRouter, refusing, saying

TEXT = "Grüße, 世界! And on it goes."
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = TraceContext(f"00-{TRACE_ID}-00f067aa0ba902b7-01", "a=1")
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "seed": 7}


@pytest.fixture
def ids(tokenizer: ModelTokenizer) -> list[int]:
    return [*tokenizer.encode(TEXT), 2]


@pytest.fixture
def router(ids: list[int]) -> ScriptedRouter:
    return ScriptedRouter(saying(ids, size=3))


def traced(running: RunningGateway) -> InMemorySpanExporter:
    """Has the gateway's spans from now on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    running.core.tracing = Tracing(provider)
    return exporter


async def chat(http: httpx.AsyncClient, headers: dict[str, str], **more: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={**BODY, **more}, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_http_callers_send_is_passed_on(
    http: httpx.AsyncClient, router: ScriptedRouter, stream: bool
) -> None:
    assert (await chat(http, PARENT.headers, stream=stream)).status_code == 200
    assert (await chat(http, {"traceparent": "nonsense"})).status_code == 200
    assert router.trace_contexts == [PARENT, NO_CONTEXT]


async def test_what_grpc_callers_send_is_passed_on(stub: Stub, router: ScriptedRouter) -> None:
    request = generation_pb2.GenerateRequest(model=MODEL, text="hi")
    await stub.Generate(request, metadata=tuple(PARENT.headers.items()))
    call = stub.StreamGenerate(
        generation_pb2.StreamGenerateRequest(request=request), metadata=tuple(PARENT.headers.items())
    )
    assert [message async for message in call]
    assert router.trace_contexts == [PARENT, PARENT]


async def test_the_gateways_span_lies_between_the_callers_and_the_routers(
    http: httpx.AsyncClient, running: RunningGateway, router: ScriptedRouter, ids: list[int]
) -> None:
    exporter = traced(running)
    response = await chat(http, PARENT.headers)
    (span,) = exporter.get_finished_spans()
    assert span.name == f"chat {MODEL}"
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT.traceparent[36:52]
    assert span.context is not None
    assert router.trace_contexts == [TraceContext(f"00-{TRACE_ID}-{span.context.span_id:016x}-01", "a=1")]
    attributes = dict(span.attributes or {})
    answer, usage = response.json(), response.json()["usage"]
    assert answer["id"] == f"chatcmpl-{attributes['gen_ai.response.id']}"
    assert attributes["gen_ai.response.id"] == response.headers["x-request-id"]
    assert attributes["gen_ai.operation.name"] == "chat"
    assert (attributes["gen_ai.request.temperature"], attributes["gen_ai.request.seed"]) == (0.5, 7)
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == len(ids)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert not any(TEXT[:5] in str(value) for value in attributes.values())


async def test_a_request_without_context_begins_a_trace(
    http: httpx.AsyncClient, running: RunningGateway, router: ScriptedRouter
) -> None:
    exporter = traced(running)
    assert (await chat(http, {})).status_code == 200
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and span.context is not None
    assert router.trace_contexts[0].trace_id == f"{span.context.trace_id:032x}"


async def test_a_failed_request_is_a_failed_span_without_its_message(
    http: httpx.AsyncClient, running: RunningGateway, router: ScriptedRouter
) -> None:
    router.script = refusing(Overloaded("secret"))
    exporter = traced(running)
    assert (await chat(http, {})).status_code == 429
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, (span.attributes or {})["error.type"]) == (StatusCode.ERROR, "OVERLOADED")
    assert "secret" not in span.to_json()


async def test_tokens_can_be_looked_up(stub: Stub, ids: list[int]) -> None:
    answer = await stub.Detokenize(generation_pb2.DetokenizeRequest(model=MODEL, token_ids=ids))
    assert b"".join(answer.tokens).decode() == TEXT
    assert (len(answer.tokens), answer.tokens[-1]) == (len(ids), b"")


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"model": "other", "token_ids": [1]}, "model"),
        ({"model": MODEL, "token_ids": [1, VOCAB]}, "token_ids[1]"),
        ({"model": MODEL, "token_ids": [1] * 65_537}, "token_ids"),
    ],
)
async def test_a_look_up_that_makes_no_sense_is_refused_by_its_field(
    stub: Stub, bad: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Detokenize(generation_pb2.DetokenizeRequest(**bad))
    error: OutriderError = from_rpc_error(caught.value)
    assert error.field == field
