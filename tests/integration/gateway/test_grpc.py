"""The public gRPC API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.errors import Code, NotSupported, OutriderError, Overloaded
from outrider.gateway.config import GatewayLimits
from outrider.gateway.server import RunningGateway
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.channel import create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2, router_pb2, sequence_pb2, tokenizer_pb2

from tests.integration.gateway.conftest import OpenGateway, Stub
from tests.integration.gateway.scripted_router import (
    CONTEXT,
    MODEL,
    VOCAB,
    ScriptedRouter,
    refusing,
    round_of,
    routing,
    saying,
    until,
)

TEXT = "Grüße, 世界! And on it goes."
Request = generation_pb2.GenerateRequest
Options = generation_pb2.GenerationOptions
Tokens = generation_pb2.TokenPrompt


@pytest.fixture
def ids(tokenizer: ModelTokenizer) -> list[int]:
    return [*tokenizer.encode(TEXT), 2]


@pytest.fixture
def router(ids: list[int]) -> ScriptedRouter:
    return ScriptedRouter(saying(ids, size=3))


def streaming(request: Request) -> generation_pb2.StreamGenerateRequest:
    return generation_pb2.StreamGenerateRequest(request=request)


async def failure(call: Any) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call if not hasattr(call, "__aiter__") else [message async for message in call]
    return from_rpc_error(caught.value)


async def test_text_chat_and_tokens_all_reach_the_router(
    stub: Stub, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    chat = generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    await stub.Generate(Request(model=MODEL, text="hi"))
    await stub.Generate(Request(model=MODEL, chat=chat))
    await stub.Generate(Request(model=MODEL, tokens=Tokens(token_ids=[9, 8])))
    prompts = [list(request.prompt_token_ids) for request in router.requests]
    assert prompts == [
        tokenizer.encode("hi"),
        tokenizer.encode_plain(tokenizer.rendering("", [{"role": "user", "content": "hi"}]).result()),
        [9, 8],
    ]


async def test_a_unary_answer_is_complete(stub: Stub, ids: list[int]) -> None:
    options = Options(include_metrics=True)
    answer = await stub.Generate(Request(model=MODEL, text="hi", options=options))
    assert (answer.text, list(answer.token_ids), answer.finish_reason) == (TEXT, ids, "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, len(ids))
    assert answer.usage.cached_tokens == 3
    sums = answer.metrics.speculative_decoding
    assert sums.num_accepted_draft_tokens == sums.num_draft_tokens > 0
    assert sum(sums.acceptance_histogram) == sums.num_spec_steps


async def test_a_stream_says_of_each_round_what_was_accepted(stub: Stub, ids: list[int]) -> None:
    messages = [m async for m in stub.StreamGenerate(streaming(Request(model=MODEL, text="hi")))]
    assert "".join(m.text for m in messages) == TEXT
    assert [i for m in messages for i in m.token_ids] == ids
    assert all(m.num_accepted == len(m.token_ids) - 1 for m in messages)
    assert [m.finish_reason for m in messages if m.finish_reason] == ["stop"]
    assert messages[-1].usage.completion_tokens == len(ids)
    assert not messages[-1].HasField("metrics")


async def test_several_answers_logprobs_structure_and_a_prediction(
    stub: Stub, router: ScriptedRouter, tokenizer: ModelTokenizer, ids: list[int]
) -> None:
    async def telling(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        found = [sequence_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=[7], top_logprobs=[-0.25])] * len(ids)
        of_prompt = [sequence_pb2.TokenLogprobs(logprob=-2.0)]
        end = sequence_pb2.FINISH_REASON_STOP
        yield round_of(ids, finish_reason=end, logprobs=found, prompt_logprobs=of_prompt)

    router.script = telling
    structured = generation_pb2.StructuredOutput(choice=generation_pb2.TextChoice(texts=["yes", "no"]))
    options = Options(n=2, seed=5, logprobs=1, prompt_logprobs=True, prediction=TEXT)
    answer = await stub.Generate(Request(model=MODEL, text="hi", options=options))
    messages = [m async for m in stub.StreamGenerate(streaming(Request(model=MODEL, text="hi", options=options)))]
    pytest.importorskip("llguidance")
    await stub.Generate(Request(model=MODEL, text="hi", options=Options(structured=structured)))
    first, second, *_, grammar = router.requests
    assert (first.sampling.seed, second.sampling.seed) == (5, 6)
    assert list(first.predicted_token_ids) == tokenizer.encode_plain(TEXT)
    assert (first.logprobs.num_top, first.logprobs.prompt) == (1, True)
    assert grammar.logits.grammar == 'start: CHOICE\nCHOICE: "yes" | "no"'
    assert [answer.text, *(other.text for other in answer.others)] == [TEXT, TEXT]
    assert (len(answer.logprobs), len(answer.others[0].logprobs)) == (len(ids), len(ids))
    assert answer.logprobs[0].top_logprobs[0] == -0.25
    assert [each.logprob for each in answer.prompt_logprobs] == [-2.0]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 2 * len(ids))
    assert answer.usage.accepted_prediction_tokens == 2 * (len(ids) - 1)
    assert {message.index for message in messages if message.finish_reason} == {0, 1}
    assert all(len(message.logprobs) == len(message.token_ids) for message in messages)


async def test_a_broken_off_answer_is_resumed_without_losing_or_repeating_text(
    stub: Stub, router: ScriptedRouter, ids: list[int]
) -> None:
    router.script = saying(ids)
    for cut in range(1, len(ids), 2):
        request = Request(model=MODEL, text="hi", options=Options(stop=["世人"]))
        text, got = "", []
        async for message in stub.StreamGenerate(streaming(request)):
            text += message.text
            got += message.token_ids
            if len(got) >= cut:
                break
        request.resume_token_ids.extend(got)
        rest = await stub.Generate(request)
        assert text + rest.text == TEXT
        assert [*got, *rest.token_ids] == ids
        assert rest.usage.completion_tokens == len(ids)


async def test_a_client_that_leaves_cancels_the_call(
    running: RunningGateway, stub: Stub, router: ScriptedRouter, ids: list[int]
) -> None:
    router.script = saying(ids, pause_s=0.02)
    for _ in range(5):
        call = stub.StreamGenerate(streaming(Request(model=MODEL, text="hi")))
        await anext(aiter(call))
        call.cancel()
    unary = stub.Generate(Request(model=MODEL, text="hi"))
    await until(lambda: len(router.requests) == 6)
    unary.cancel()
    await until(lambda: router.num_cancelled == 6 and running.core.admission.running == 0)


async def test_the_callers_deadline_is_passed_on_with_a_margin_and_kept(
    running: RunningGateway, stub: Stub, router: ScriptedRouter
) -> None:
    router.script = saying([40] * 400, pause_s=0.05)
    error = await failure(stub.StreamGenerate(streaming(Request(model=MODEL, text="hi")), timeout=2.0))
    assert error.code is Code.DEADLINE_EXCEEDED
    await until(lambda: running.core.admission.running == 0)
    assert router.timeouts_s[0] is not None
    assert router.timeouts_s[0] < 2.0


async def test_overload_carries_a_retry_delay(stub: Stub, router: ScriptedRouter) -> None:
    router.script = refusing(Overloaded("full", retry_after_s=2))
    error = await failure(stub.Generate(Request(model=MODEL, text="hi")))
    assert (error.code, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 2)
    assert len(router.requests) == 1


NAN = float("nan")
BAD: list[tuple[Request, str]] = [
    (Request(text="hi"), "model"),
    (Request(model=MODEL), "prompt"),
    (Request(model=MODEL, text=""), "text"),
    (Request(model=MODEL, chat=generation_pb2.ChatPrompt()), "chat.messages"),
    (
        Request(
            model=MODEL,
            chat=generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="tool", content="x")]),
        ),
        "chat.messages[0].role",
    ),
    (Request(model=MODEL, text="a", options=Options(n=0)), "options.n"),
    (Request(model=MODEL, text="a", options=Options(n=2), resume_token_ids=[5]), "resume_token_ids"),
    (Request(model=MODEL, text="a", options=Options(logprobs=21)), "options.logprobs"),
    (Request(model=MODEL, text="a", options=Options(prompt_logprobs=True)), "options.prompt_logprobs"),
    (Request(model=MODEL, text="a", options=Options(prediction="a" * 600)), "options.prediction"),
    (
        Request(model=MODEL, text="a", options=Options(structured=generation_pb2.StructuredOutput())),
        "options.structured",
    ),
    (
        Request(model=MODEL, text="a", options=Options(structured=generation_pb2.StructuredOutput(json_schema="{"))),
        "options.structured.json_schema",
    ),
    (Request(model=MODEL, tokens=Tokens()), "tokens.token_ids"),
    (Request(model=MODEL, tokens=Tokens(token_ids=[1, VOCAB])), "tokens.token_ids[1]"),
    (Request(model=MODEL, tokens=Tokens(token_ids=[5] * CONTEXT)), "tokens.token_ids"),
    (Request(model=MODEL, tokens=Tokens(token_ids=[5] * CONTEXT + [VOCAB])), "tokens.token_ids"),
    (Request(model=MODEL, text="a" * CONTEXT), "text"),
    (Request(model=MODEL, text="a", resume_token_ids=[5] * CONTEXT + [VOCAB]), "resume_token_ids"),
    (Request(model=MODEL, text="a", resume_token_ids=[VOCAB]), "resume_token_ids[0]"),
    (Request(model=MODEL, text="a", options=Options(temperature=NAN)), "options.temperature"),
    (Request(model=MODEL, text="a", options=Options(top_p=NAN)), "options.top_p"),
    (Request(model=MODEL, text="a", options=Options(min_p=1.5)), "options.min_p"),
    (Request(model=MODEL, text="a", options=Options(top_k=2**31)), "options.top_k"),
    (Request(model=MODEL, text="a", options=Options(max_tokens=0)), "options.max_tokens"),
    (Request(model=MODEL, text="a", options=Options(max_tokens=CONTEXT)), "options.max_tokens"),
    (Request(model=MODEL, text="a", options=Options(max_draft_tokens=65)), "options.max_draft_tokens"),
    (Request(model=MODEL, text="a", options=Options(speculation=9)), "options.speculation"),  # type: ignore[arg-type]
    (Request(model=MODEL, text="a", options=Options(stop=[""])), "options.stop[0]"),
    (Request(model=MODEL, text="a", options=Options(presence_penalty=-2.5)), "options.presence_penalty"),
    (Request(model=MODEL, text="a", options=Options(repetition_penalty=0)), "options.repetition_penalty"),
    (Request(model=MODEL, text="a", options=Options(logit_bias={5: NAN})), "options.logit_bias[5]"),
    (Request(model=MODEL, text="a", options=Options(allowed_token_ids=[VOCAB])), "options.allowed_token_ids"),
    (Request(model=MODEL, text="a", options=Options(bad_words=[""])), "options.bad_words[0]"),
    (
        Request(
            model=MODEL,
            text="a",
            options=Options(
                logits=sequence_pb2.LogitsOptions(repetition_penalty=1, allowed_token_ids=[5], grammar="start: /[0-9]/")
            ),
        ),
        "options.logits.allowed_token_ids",
    ),
    (Request(model=MODEL, text="a", options=Options(stop_token_ids=[VOCAB])), "options.stop_token_ids[0]"),
]


async def test_what_a_target_does_not_support_is_named_by_its_path(stub: Stub, router: ScriptedRouter) -> None:
    pytest.importorskip("llguidance")
    router.script = refusing(NotSupported("logits.grammar", "needs the extra `structured`"))
    asked = Options(structured=generation_pb2.StructuredOutput(regex="a+"))
    request = Request(model=MODEL, text="a", options=asked)
    error = await failure(stub.Generate(request))
    assert (error.code, error.field) == (Code.UNIMPLEMENTED, "options.structured.regex")


async def test_every_bad_field_is_named_and_nothing_reaches_the_router(stub: Stub, router: ScriptedRouter) -> None:
    for request, field in BAD:
        unary = await failure(stub.Generate(request))
        assert (unary.code, unary.field) == (Code.INVALID_ARGUMENT, field)
        stream = await failure(stub.StreamGenerate(streaming(request)))
        assert (stream.code, stream.field) == (Code.INVALID_ARGUMENT, f"request.{field}")
    assert router.requests == []


async def test_an_unknown_model_is_not_found(stub: Stub) -> None:
    request = Request(model="/etc/passwd", text="a")
    for call, field in (
        (stub.Generate(request), "model"),
        (stub.StreamGenerate(streaming(request)), "request.model"),
    ):
        error = await failure(call)
        assert (error.code, error.reason, error.field) == (Code.NOT_FOUND, "UNKNOWN_MODEL", field)


@pytest.mark.parametrize("options", [{"limits": GatewayLimits(max_body_bytes=10_000)}])
async def test_a_message_over_the_limit_is_refused_and_the_connection_survives(stub: Stub) -> None:
    error = await failure(stub.Generate(Request(model=MODEL, text="a" * 20_000)))
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert (await stub.Generate(Request(model=MODEL, text="a"))).text == TEXT


@pytest.mark.parametrize("beyond", [-1, 0, 1])
async def test_a_message_is_read_up_to_four_mebibytes_exactly(stub: Stub, beyond: int) -> None:
    size, request = GatewayLimits().max_body_bytes + beyond, Request(model=MODEL)
    # A text that long has a tag of one byte, and a length of four.
    request.text = "a" * (size - request.ByteSize() - 5)
    assert (request.ByteSize(), GatewayLimits().max_body_bytes) == (size, 4 << 20)
    error = await failure(stub.Generate(request))
    # Read, it is a prompt that no model has room for.
    assert error.code is (Code.RESOURCE_EXHAUSTED if beyond > 0 else Code.INVALID_ARGUMENT)
    assert (await stub.Generate(Request(model=MODEL, text="a"))).text == TEXT


@pytest.mark.parametrize(
    ("has", "reason"), [({"tokenizer_sha256": "0" * 64}, "TOKENIZER_UNAVAILABLE"), ({"tokenizer": b""}, "NO_TOKENIZER")]
)
async def test_a_model_says_that_its_targets_have_no_tokenizer_or_not_the_one_that_was_told(
    gateway: OpenGateway, has: dict[str, Any], reason: str
) -> None:
    async with (
        routing(ScriptedRouter(saying([40, 2]), **has)) as address,
        gateway(address) as running,
        create_channel(running.grpc_address) as channel,
    ):
        error = await failure(Stub(channel).Generate(Request(model=MODEL, text="a")))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, reason)


async def test_a_gateway_follows_targets_that_come_back_with_another_tokenizer(
    stub: Stub, router: ScriptedRouter
) -> None:
    await stub.Generate(Request(model=MODEL, text="a"))
    other = tokenizer_pb2.Tokenizer.FromString(router.tokenizer)
    other.eos_token_ids[:] = [5]
    router.tokenizer = other.SerializeToString(deterministic=True)
    async with asyncio.timeout(60):
        while list(router.requests[-1].stopping.stop_token_ids) != [5]:
            answer = await stub.Generate(Request(model=MODEL, text="a"))
    assert answer.text == TEXT


async def test_health_follows_whether_a_model_is_served(gateway: OpenGateway, router: ScriptedRouter) -> None:
    router.models = ()
    service = health_pb2.HealthCheckRequest(service="outrider.rpc.v1.GenerationService")
    async with routing(router) as address, gateway(address) as running, create_channel(running.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(service)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        router.models = (MODEL,)
        async with asyncio.timeout(60):
            async for answer in health.Watch(service):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
