"""The OpenAI-compatible API, through the stock client where it can say what is meant."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from outrider.errors import DeadlineExceeded, InternalError, InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.gateway.config import GatewayLimits
from outrider.gateway.server import RunningGateway
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, router_pb2, sequence_pb2
from outrider.target.grammars.tokenizer import read_tokenizer
from transformers import GenerationConfig

from tests.integration.gateway.conftest import events_of
from tests.integration.gateway.scripted_router import CONTEXT, MODEL, ScriptedRouter, refusing, round_of, saying, until

TEXT = "The €uro and 日本: a stop. And more."


@pytest.fixture
def ids(tokenizer: ModelTokenizer) -> list[int]:
    return [*tokenizer.encode(TEXT), 2]


@pytest.fixture
def router(ids: list[int]) -> ScriptedRouter:
    return ScriptedRouter(saying(ids, size=3))


async def test_a_completion_has_text_reason_and_usage(
    client: openai.AsyncOpenAI, tokenizer: ModelTokenizer, ids: list[int]
) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Say it", max_tokens=100)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (TEXT, "stop")
    assert answer.usage.prompt_tokens == len(tokenizer.encode("Say it"))
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.id.startswith("cmpl-")


@pytest.mark.parametrize("stream", [True, False])
async def test_of_a_running_request_nothing_is_held_that_is_read_once(
    http: httpx.AsyncClient, router: ScriptedRouter, ids: list[int], stream: bool
) -> None:
    """A body of brackets is 25 times as long when it is parsed."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def waiting(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        begun.set()
        await goes_on.wait()
        yield round_of(ids, finish_reason=sequence_pb2.FINISH_REASON_STOP)

    router.script = waiting
    brackets: list[Any] = [[] for _ in range(100_000)]
    message = {"role": "user", "content": [{"type": "text", "text": "Say it", "more": brackets}], "more": brackets}
    content = json.dumps({"model": MODEL, "stream": stream, "messages": [message]}).encode()
    del message, brackets

    def num_held() -> int:
        return sum(type(one) is list and not one for one in gc.get_objects())

    before, headers = num_held(), {"content-type": "application/json"}
    asking = asyncio.create_task(http.post("/v1/chat/completions", content=content, headers=headers))
    await begun.wait()
    assert num_held() - before < 10_000
    goes_on.set()
    assert (await asking).status_code == 200


async def test_what_was_asked_reaches_the_router(
    client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    await client.completions.create(
        model=MODEL,
        prompt=[5, 6, 7],
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        extra_body={"top_k": 4, "min_p": 0.1, "stop_token_ids": [9], "speculation": "off", "max_draft_tokens": 2},
    )
    asked = router.requests[0]
    assert list(asked.prompt_token_ids) == [5, 6, 7]
    assert (asked.model, asked.seeded, asked.sampling.seed) == (MODEL, True, 11)
    assert (asked.sampling.temperature, asked.sampling.top_k) == (0.5, 4)
    assert asked.sampling.top_p == pytest.approx(0.9)
    assert asked.sampling.min_p == pytest.approx(0.1)
    assert asked.stopping.max_new_tokens == 9
    assert sorted(asked.stopping.stop_token_ids) == [*tokenizer.eos_token_ids, 9]
    assert asked.speculation == router_pb2.SPECULATION_MODE_OFF
    assert asked.max_draft_tokens == 2


async def test_what_is_asked_of_the_logits_reaches_the_router(
    client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    await client.completions.create(
        model=MODEL,
        prompt="a",
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"5": 100, "6": -100},
        extra_body={
            "repetition_penalty": 1.5,
            "allowed_token_ids": [5, 6, 7],
            "bad_words": [" no", "n"],
            "min_tokens": 3,
        },
    )
    await client.completions.create(model=MODEL, prompt="a", presence_penalty=0, logit_bias={})
    asked, nothing = router.requests
    [n, o, space] = [tokenizer.encode(letter)[0] for letter in "no "]
    assert asked.logits == sequence_pb2.LogitsOptions(
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        bias_token_ids=[5, 6],
        biases=[100, -100],
        allowed_token_ids=[5, 6, 7],
        # Every byte is a token here, so a space before a word only makes it longer.
        bad_words=[sequence_pb2.TokenRun(token_ids=[n, o]), sequence_pb2.TokenRun(token_ids=[n])],
        min_tokens=3,
    )
    assert space not in [token for run in asked.logits.bad_words for token in run.token_ids]
    assert not nothing.HasField("logits")


async def test_structured_output_reaches_the_router_as_a_grammar(
    client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    described: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    message: Any = {"role": "user", "content": "a"}
    await client.chat.completions.create(model=MODEL, messages=[message], response_format=described)
    await client.chat.completions.create(model=MODEL, messages=[message], response_format={"type": "json_object"})
    await client.completions.create(
        model=MODEL, prompt="a", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    await client.chat.completions.create(model=MODEL, messages=[message], response_format={"type": "text"})
    with pytest.raises(openai.BadRequestError) as refused:
        described["json_schema"]["schema"] = {"type": 5}
        await client.chat.completions.create(model=MODEL, messages=[message], response_format=described)
    of_schema, any_object, choice, nothing = router.requests
    assert json.loads(of_schema.logits.grammar)["grammars"][0]["json_schema"]["required"] == ["a"]
    assert json.loads(any_object.logits.grammar)["grammars"][0]["json_schema"]["type"] == "object"
    assert choice.logits.grammar == 'start: CHOICE\nCHOICE: "yes" | "no"'
    assert not nothing.HasField("logits")
    assert refused.value.body["param"] == "response_format.json_schema.schema"


async def test_a_prediction_reaches_the_router_and_is_counted(
    client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    message: Any = {"role": "user", "content": "a"}
    predicted: Any = {"type": "content", "content": [{"type": "text", "text": TEXT.replace("stop", "zzzz")}]}
    whole = await client.chat.completions.create(model=MODEL, messages=[message], prediction=predicted)
    stream = await client.chat.completions.create(
        model=MODEL, messages=[message], prediction=predicted, stream=True, stream_options={"include_usage": True}
    )
    usages = [chunk.usage async for chunk in stream if chunk.usage]
    plain = await client.chat.completions.create(model=MODEL, messages=[message])
    assert list(router.requests[0].predicted_token_ids) == tokenizer.encode_plain(TEXT.replace("stop", "zzzz"))
    for usage in (whole.usage, *usages):
        details = usage.completion_tokens_details
        total = len(tokenizer.encode_plain(TEXT))
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (total - 4, 4)
    assert plain.usage.completion_tokens_details is None


async def test_what_a_target_refuses_has_the_clients_name(client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    pytest.importorskip("llguidance")
    for theirs, ours in (("logits.grammar", "structured_outputs.choice"), ("logits.biases", "biases")):
        router.script = refusing(InvalidRequest(theirs, "too complex"))
        with pytest.raises(openai.BadRequestError, match="too complex") as refused:
            body = {"structured_outputs": {"choice": ["yes", "no"]}}
            await client.completions.create(model=MODEL, prompt="a", extra_body=body)
        assert refused.value.body["param"] == ours  # type: ignore[index]


STATED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.25}
"""What a model's generation_config.json states, beside `max_new_tokens`."""


@pytest.fixture
def stated(tiny: Path, tmp_path: Path, router: ScriptedRouter) -> None:
    for file in tiny.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    GenerationConfig(**STATED, max_new_tokens=77, do_sample=True, eos_token_id=2).save_pretrained(tmp_path)
    router.tokenizer = read_tokenizer(tmp_path)


async def by_grpc(gateway: RunningGateway, options: generation_pb2.GenerationOptions | None = None) -> None:
    async with create_channel(gateway.grpc_address) as channel:
        request = generation_pb2.GenerateRequest(model=MODEL, text="a", options=options)
        await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)


@pytest.mark.usefixtures("stated")
async def test_what_a_request_leaves_out_is_as_the_models_generation_config_states(
    running: RunningGateway, client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    await client.completions.create(model=MODEL, prompt="a")
    await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
    await by_grpc(running)
    [listed] = (await client.models.list()).data
    found = await client.models.retrieve(MODEL)
    for shown in (listed, found):
        assert shown.model_extra["sampling_defaults"] == {**STATED, "max_tokens": 77}
    for asked in router.requests:
        sampling = asked.sampling
        assert [sampling.temperature, sampling.top_p, sampling.min_p] == pytest.approx([0.6, 0.95, 0.05])
        assert (sampling.top_k, asked.logits.repetition_penalty) == (20, 1.25)
    # Where the API itself has a default length, that one counts.
    assert [asked.stopping.max_new_tokens for asked in router.requests] == [16, 77, 256]


@pytest.mark.usefixtures("stated")
async def test_the_fields_of_a_request_win_over_the_models_even_if_they_change_nothing(
    running: RunningGateway, client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    own: dict[str, Any] = {"top_k": 0, "min_p": 0, "repetition_penalty": 1}
    all_own: dict[str, Any] = {"temperature": 1, "top_p": 1, "max_tokens": 100, **own}
    await client.completions.create(
        model=MODEL, prompt="a", temperature=1, top_p=1, max_tokens=100, n=2, extra_body=own
    )
    await by_grpc(running, generation_pb2.GenerationOptions(**all_own))
    for asked in router.requests:
        assert asked.sampling == sequence_pb2.Sampling(temperature=1, top_p=1)
        assert (asked.HasField("logits"), asked.stopping.max_new_tokens) == (False, 100)
    for asked in ({}, {"temperature": 0.7}):
        await client.completions.create(model=MODEL, prompt="a", **asked, extra_body={"do_sample": False})
        assert (router.requests[-1].sampling.temperature, router.requests[-1].sampling.top_k) == (0, 20)


@pytest.mark.usefixtures("stated")
@pytest.mark.parametrize("options", [{"generation_config": "none"}])
async def test_a_gateway_may_take_no_notice_of_generation_configs(
    client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
    assert (await client.models.retrieve(MODEL)).sampling_defaults == {}
    [asked] = router.requests
    assert (asked.sampling, asked.HasField("logits")) == (sequence_pb2.Sampling(temperature=1, top_p=1), False)
    assert asked.stopping.max_new_tokens == CONTEXT - len(asked.prompt_token_ids)


async def test_no_stop_string_ends_an_answer_before_min_tokens(client: openai.AsyncOpenAI) -> None:
    early = await client.completions.create(model=MODEL, prompt="a", max_tokens=100, stop=["e", "."])
    late = await client.completions.create(
        model=MODEL, prompt="a", max_tokens=100, stop=["e", "."], extra_body={"min_tokens": 3}
    )
    assert early.choices[0].text == "Th"
    assert late.choices[0].text == TEXT[: TEXT.index(".")]


async def test_defaults_are_those_of_the_api(client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    await client.completions.create(model=MODEL, prompt="a")
    await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
    completion, chat = router.requests
    assert (completion.sampling.temperature, completion.sampling.top_p, completion.seeded) == (1, 1, False)
    assert completion.stopping.max_new_tokens == 16
    assert completion.speculation == router_pb2.SPECULATION_MODE_AUTO
    assert not completion.HasField("max_draft_tokens")
    assert chat.stopping.max_new_tokens == CONTEXT - len(chat.prompt_token_ids)


async def test_ignore_eos_sends_no_end_tokens(client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    await client.completions.create(model=MODEL, prompt="a", extra_body={"ignore_eos": True})
    assert not router.requests[0].stopping.stop_token_ids


async def test_a_chat_uses_the_models_template(
    client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    answer = await client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    rendered = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    decoded = tokenizer.tokenizer.decode(router.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert decoded == rendered


async def test_a_stream_says_the_same_as_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=100, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_finish_reason_of_a_stream_comes_after_all_content(http: httpx.AsyncClient, path: str) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = await http.post(path, json={"model": MODEL, "stream": True, "max_tokens": 3, **asked})
    choices = [json.loads(event)["choices"][0] for event in events_of(answer.text)]
    assert "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices)
    last = choices[-1]
    assert last["finish_reason"] == "length"
    assert last.get("delta", {}) == {} and last.get("text", "") == "" and last["logprobs"] is None


async def test_an_error_after_the_headers_is_an_event(client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    async def late(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        await headers_came.wait()
        yield round_of([])
        raise Unavailable("no target", reason="NO_TARGET")

    router.script, headers_came = late, asyncio.Event()
    stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
    headers_came.set()
    with pytest.raises(openai.APIError, match="no target"):
        await anext(aiter(stream))


async def test_a_chat_stream_opens_with_the_role_and_ends_with_usage_and_metrics(
    client: openai.AsyncOpenAI, ids: list[int]
) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"include_metrics": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    last = chunks[-1]
    assert last.choices == []
    assert last.usage.completion_tokens == len(ids)
    assert last.metrics["speculative_decoding"]["num_spec_steps"] > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_usage_comes_with_every_chunk_where_that_is_asked(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=5, stream=True, stream_options=options)
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts) and counts[-1] == 5
    assert {usage.prompt_tokens for usage in usages} == {usages[-1].prompt_tokens}


async def test_a_stream_ends_with_done_in_server_sent_events(http: httpx.AsyncClient) -> None:
    answer = await http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a", "stream": True, "include_metrics": True}
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert "speculative_decoding" in last["metrics"]


async def test_metrics_are_given_only_when_asked_and_sum_up_the_rounds(client: openai.AsyncOpenAI) -> None:
    plain = await client.completions.create(model=MODEL, prompt="a", max_tokens=30)
    asked = await client.completions.create(
        model=MODEL, prompt="a", max_tokens=30, extra_body={"include_metrics": True}
    )
    assert not hasattr(plain, "metrics")
    sums = asked.metrics["speculative_decoding"]
    full = 10  # rounds of 3 tokens, of which the router drafted 2
    assert sums["num_spec_steps"] == full
    assert sums["num_draft_tokens"] == sums["num_accepted_draft_tokens"] == sums["num_verified_tokens"] == 2 * full
    assert sums["acceptance_histogram"] == [0, 0, full]
    assert sums["acceptance_histogram_by_draft_length"] == {"2": [0, 0, full]}
    assert (sums["mean_acceptance_length"], sums["draft_acceptance_rate"], sums["num_spec_tokens"]) == (3, 1, 2)
    assert asked.metrics["time_to_first_token_ms"] > 0
    assert asked.metrics["queue_time_ms"] == pytest.approx(0.1)


async def test_a_stop_string_ends_the_text_the_usage_and_the_call(
    client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer, ids: list[int]
) -> None:
    router.script = saying(ids, size=4, pause_s=0.05)
    answer = await client.completions.create(model=MODEL, prompt="a", max_tokens=100, stop=["never", "日本:"])
    assert answer.choices[0].text == "The €uro and "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(tokenizer.encode("The €uro and 日本:"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    await until(lambda: router.num_cancelled == 1)
    assert router.num_running == 0


async def test_models_are_listed_and_found_by_name(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "outrider"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_no_answer_sends_a_client_to_the_host_that_its_request_names(http: httpx.AsyncClient) -> None:
    paths = "/v1/completions/", "/v1/chat/completions/", "/v1/models/", "/health/", "/tokenize/", "//elsewhere.example/"
    for method, path in itertools.product(("GET", "POST"), paths):
        answer = await http.request(method, path, json={}, headers={"Host": "elsewhere.example"})
        assert answer.status_code in (404, 405) and "location" not in answer.headers, (method, path)


async def test_health_and_metrics_tell_what_happened(
    http: httpx.AsyncClient, running: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    await client.completions.create(model=MODEL, prompt="abc", max_tokens=5)
    await http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "n": 0})
    health = await http.get("/health")
    public = await http.get("/metrics")
    exposition = running.core.metrics.registry.get_sample_value
    assert (health.status_code, health.json()["models"]) == (200, [MODEL])
    assert public.status_code == 404 and "--api-metrics" in public.text
    model = {"model_name": "tiny"}
    assert exposition("outrider_request_success_total", {**model, "finished_reason": "length"}) == 1
    assert exposition("outrider_request_generation_tokens_sum", model) == 5
    assert exposition("outrider_request_prompt_tokens_sum", model) == 3
    assert exposition("outrider_time_to_first_token_seconds_count", model) == 1
    assert exposition("outrider_request_queue_time_seconds_sum", model) == pytest.approx(0.0001)
    assert exposition("outrider_gateway_requests_running") == 0


async def test_counting_tokens_is_bounded_and_has_a_place_like_any_request(
    running: RunningGateway, http: httpx.AsyncClient, tokenizer: ModelTokenizer
) -> None:
    asked = [("/tokenize", "prompt", "ab " * 2000), ("/detokenize", "tokens", [40] * 2000)]
    for path, field, value in asked:
        refused = await http.post(path, json={"model": MODEL, field: value})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded")
    admission = running.core.admission
    with admission.enter(num_places=admission.max_running):
        for path, field, value in (("/tokenize", "prompt", "ab"), ("/detokenize", "tokens", [40])):
            assert (await http.post(path, json={"model": MODEL, field: value})).status_code == 429
        async with create_channel(running.grpc_address) as channel:
            request = generation_pb2.DetokenizeRequest(model=MODEL, token_ids=[40])
            with pytest.raises(grpc.aio.AioRpcError, match="under way"):
                await generation_pb2_grpc.GenerationServiceStub(channel).Detokenize(request)
    tokens = (await http.post("/tokenize", json={"model": MODEL, "prompt": "ab"})).json()["tokens"]
    assert tokens == tokenizer.encode("ab")


async def test_a_gateway_stays_ready_while_a_model_may_come_back(
    running: RunningGateway, client: openai.AsyncOpenAI, http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    await client.completions.create(model=MODEL, prompt="abc", max_tokens=5)
    router.models = ()
    await until(lambda: bool(running.core.catalog.awaited))
    health = await http.get("/health")
    assert (health.status_code, health.json()["models"], health.json()["awaited"]) == (200, [], [MODEL])


async def test_a_client_that_leaves_a_stream_cancels_the_call_at_once(
    running: RunningGateway, client: openai.AsyncOpenAI, router: ScriptedRouter, ids: list[int]
) -> None:
    router.script = saying(ids, pause_s=0.05)
    stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=100, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: router.num_cancelled == 1 and running.core.admission.running == 0)


async def test_a_client_that_leaves_before_the_first_token_cancels_the_call(
    running: RunningGateway, client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    router.script = silence
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(model=MODEL, prompt="a", timeout=1.0)
    # The headers of a stream come although the model says nothing.
    stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
    await stream.close()
    await until(lambda: router.num_cancelled == 2 and running.core.admission.running == 0)
    failed = running.core.metrics.registry.get_sample_value("outrider_request_failure_total", {"reason": "cancelled"})
    assert failed == 2


async def silence(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
    await asyncio.Event().wait()
    yield round_of([])


async def test_an_error_before_the_first_token_has_its_own_status(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    errors = [
        (Overloaded("full", retry_after_s=2.5), 429, "rate_limit_error", "rate_limit_exceeded"),
        (Unavailable("no target", reason="NO_TARGET"), 503, "service_unavailable", "no_target"),
        (DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded"),
        (OutriderError("secret detail"), 500, "server_error", "internal"),
    ]
    for (error, status, kind, code), stream in itertools.product(errors, (False, True)):
        router.script = refusing(error)
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "stream": stream})
        assert answer.status_code == status
        assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == (kind, code)
        assert "secret" not in answer.text
        assert answer.headers.get("retry-after") == ("3" if status == 429 else None)


async def test_why_a_router_gave_a_request_up_is_told(http: httpx.AsyncClient, router: ScriptedRouter) -> None:
    router.script = refusing(InternalError("given up after 2 targets failed", reason="TARGETS_FAILED"))
    error = (await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).json()["error"]
    assert (error["code"], error["message"]) == ("targets_failed", "given up after 2 targets failed")


async def test_a_router_that_reports_a_broken_end_is_an_error_not_an_answer(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    router.script = saying([40], finish=sequence_pb2.FinishReason.ValueType(9))
    assert (await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code == 500


@pytest.mark.parametrize("options", [{"limits": GatewayLimits(request_timeout_s=1.0)}])
async def test_the_time_limit_is_a_504_and_reaches_the_router(http: httpx.AsyncClient, router: ScriptedRouter) -> None:
    router.script = silence
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert router.timeouts_s[0] is not None
    assert router.timeouts_s[0] <= 1.0


@pytest.mark.parametrize("options", [{"limits": GatewayLimits(max_running=1)}])
async def test_more_requests_than_allowed_are_sent_away_with_retry_after(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    router.script = silence
    first = asyncio.create_task(http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}))
    await until(lambda: router.num_running == 1)
    second = await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    first.cancel()
    assert second.status_code == 429
    assert int(second.headers["retry-after"]) >= 1


async def test_a_drain_finishes_what_runs_and_takes_nothing_new(
    http: httpx.AsyncClient, running: RunningGateway, client: openai.AsyncOpenAI, router: ScriptedRouter, ids: list[int]
) -> None:
    router.script = saying(ids, pause_s=0.01)
    stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=100, stream=True)
    text = (await anext(aiter(stream))).choices[0].text
    draining = asyncio.create_task(running.core.admission.drain(5.0))
    await until(lambda: running.core.admission.draining)
    refused = await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    health = await http.get("/health")
    text += "".join([chunk.choices[0].text async for chunk in stream])
    assert await draining
    assert text == TEXT
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert health.status_code == 503
