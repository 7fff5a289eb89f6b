"""Several answers to one request, log probabilities, and the prompt as a part of the answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from outrider.gateway.config import GatewayLimits
from outrider.gateway.generation.logits import LogitsChoice
from outrider.gateway.http.json_bytes import pieces
from outrider.gateway.http.openai.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from outrider.gateway.server import RunningGateway
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import generation_pb2, router_pb2
from outrider.rpc.v1.sequence_pb2 import TokenLogprobs
from outrider.runtime.supervision import background

from tests.integration.gateway.conftest import OpenGateway, Stub
from tests.integration.gateway.scripted_router import (
    EOS,
    MODEL,
    ScriptedRouter,
    echoing,
    logprob,
    round_of,
    routing,
    saying,
    until,
)


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter(echoing)


async def test_several_prompts_have_several_answers_each(client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["ab", "cde"], n=2, seed=1, max_tokens=20)
    assert [choice.text for choice in answer.choices] == ["baa", "baaa", "edcc", "edccc"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    # A prompt counts once.
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 4 + 5 + 5 + 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert len({request.request_id for request in router.requests}) == 4


async def test_without_keys_places_are_shared_by_address(gateway: OpenGateway, router: ScriptedRouter) -> None:
    async def ask(address: str, from_address: str, num_answers: int) -> int:
        transport = httpx.AsyncHTTPTransport(local_address=from_address)
        async with httpx.AsyncClient(transport=transport) as http:
            body = {"model": MODEL, "prompt": "a", "n": num_answers}
            return (await http.post(f"http://{address}/v1/completions", json=body)).status_code

    async with routing(router) as address, gateway(address, limits=GatewayLimits(max_running=16)) as running:
        here, admission = running.http_address, running.core.admission
        with admission.enter("default 127.0.0.1", num_places=14):
            assert [await ask(here, "127.0.0.1", n) for n in (1, 2)] == [200, 429]
            assert await ask(here, "127.0.0.2", 2) == 200


async def test_streamed_choices_are_told_apart_by_their_index(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        n=3,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts, ends = ["", "", ""], [0, 0, 0]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason == "stop"
    assert texts == ["\ntnatsissa\n"] * 3
    assert ends == [1, 1, 1]
    assert sum(choice.delta.role == "assistant" for chunk in chunks for choice in chunk.choices) == 3
    assert not chunks[-1].choices
    # Backwards, up to the end of the turn before.
    assert chunks[-1].usage.completion_tokens == 3 * (len(texts[0]) + 2)


async def test_the_first_answer_reads_the_prompt_before_the_others_are_asked_for(
    client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    begun = asyncio.Event()

    async def held(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        if len(router.requests) == 1:
            await begun.wait()
        async for response in echoing(request):
            yield response

    router.script = held
    asking = asyncio.create_task(client.completions.create(model=MODEL, prompt=["ab"], n=4))
    await until(lambda: len(router.requests) == 1)
    await asyncio.sleep(0.1)
    assert len(router.requests) == 1
    begun.set()
    assert len((await asking).choices) == 4


async def test_what_answers_have_in_common_is_made_once(
    stub: Stub, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[str] = Counter()
    for owner, name in ((ModelTokenizer, "encode"), (ModelTokenizer, "encode_plain"), (LogitsChoice, "to_proto")):
        monkeypatch.setattr(owner, name, _counted(made, name, getattr(owner, name)))
    options = generation_pb2.GenerationOptions(n=5, prediction="ba", repetition_penalty=1.1)
    request = generation_pb2.GenerateRequest(model=MODEL, text="ab", options=options)
    await stub.Generate(request)
    assert len({tuple(request.predicted_token_ids) for request in router.requests}) == 1
    assert len(router.requests) == 5
    assert made == {"encode": 1, "encode_plain": 1, "to_proto": 1}


def _counted(made: Counter[str], name: str, work: Any) -> Any:
    def counted(*args: Any) -> Any:
        made[name] += 1
        return work(*args)

    return counted


@pytest.mark.parametrize("options", [{"limits": GatewayLimits(max_running=3)}])
@pytest.mark.parametrize(("prompts", "n", "field"), [(["ab"], 4, "n"), (["ab"] * 2, 2, "prompt")])
async def test_more_answers_than_may_run_at_once_are_refused_by_name(
    http: httpx.AsyncClient, prompts: list[str], n: int, field: str
) -> None:
    body = {"model": MODEL, "prompt": prompts, "n": n}
    refused = await http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_best_of_shows_the_likeliest(client: openai.AsyncOpenAI) -> None:
    # More of the first token, which is less likely than the second, in each answer.
    answer = await client.completions.create(model=MODEL, prompt="zb", n=1, best_of=3, seed=0, max_tokens=20)
    assert answer.choices[0].text == "bz"
    assert answer.usage.completion_tokens == 3 + 4 + 5
    assert answer.choices[0].logprobs is None


async def test_a_failure_of_one_answer_is_the_request_s(client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=["ab", "c" * 600])
    assert refused.value.body["param"] == "prompt[1]"
    assert not router.requests


async def test_a_client_that_leaves_ends_every_answer(client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    async def slow(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        while True:
            yield round_of([40])
            await asyncio.sleep(0.05)

    router.script = slow
    stream = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=400, stream=True)
    await anext(aiter(stream))
    await until(lambda: len(router.requests) == 4)
    await stream.close()
    await until(lambda: router.num_cancelled == 4)


async def test_a_router_that_gives_too_few_log_probabilities_ends_the_answer_with_an_error_of_its_shape(
    client: openai.AsyncOpenAI, router: ScriptedRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router.script = saying([65, 66])
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model=MODEL, prompt="a", logprobs=1)
    assert caught.value.type == "server_error"
    assert "the router gave 0 log probabilities for 1 tokens" in caplog.text


async def test_chat_logprobs_whole_and_streamed(client: openai.AsyncOpenAI, tokenizer: ModelTokenizer) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 60,
    }
    whole = await client.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    nothing = await client.chat.completions.create(model=MODEL, messages=asked["messages"])
    content = whole.choices[0].logprobs.content
    streamed = [each for chunk in chunks if (found := chunk.choices[0].logprobs) for each in found.content or []]
    assert [each.model_dump() for each in streamed] == [each.model_dump() for each in content]
    assert len(content) == whole.usage.completion_tokens
    assert nothing.choices[0].logprobs is None
    last = content[-1]
    assert (last.token, last.bytes, last.logprob) == ("<|im_end|>", [], pytest.approx(logprob(EOS)))
    [n] = tokenizer.encode("n")
    [plain] = [each for each in content if each.token == "n"]
    assert (plain.bytes, plain.logprob) == ([ord("n")], pytest.approx(logprob(n)))
    assert [top.logprob for top in plain.top_logprobs] == [pytest.approx(logprob(n + 1)), pytest.approx(logprob(n + 2))]


async def test_completion_logprobs_have_the_token_that_came_and_offsets_in_the_text(
    client: openai.AsyncOpenAI, tokenizer: ModelTokenizer
) -> None:
    answer = await client.completions.create(model=MODEL, prompt="abc", logprobs=1, max_tokens=2)
    torn = await client.completions.create(model=MODEL, prompt="é", logprobs=1, max_tokens=2)
    [choice] = answer.choices
    [b, c] = tokenizer.encode("bc")
    assert choice.logprobs.tokens == ["c", "b"]
    assert choice.logprobs.token_logprobs == [pytest.approx(logprob(c)), pytest.approx(logprob(b))]
    assert choice.logprobs.text_offset == [0, 1]
    assert [set(top) for top in choice.logprobs.top_logprobs] == [{"c", "d"}, {"b", "c"}]
    # Half a character is no text.
    assert torn.choices[0].logprobs.tokens == ["bytes:\\xa9", "bytes:\\xc3"]


@pytest.mark.parametrize("as_tokens", [False, True])
async def test_an_evaluation_harness_reads_the_logprobs_of_prompts(
    client: openai.AsyncOpenAI, tokenizer: ModelTokenizer, as_tokens: bool
) -> None:
    """As EleutherAI's lm-evaluation-harness asks: several prompts, echo, and a token that it ignores."""
    texts = ["abc", "de"]
    prompt: Any = [tokenizer.encode(text) for text in texts] if as_tokens else texts
    answer = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    alone = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["abcc", "dee"]
    assert [choice.text for choice in alone.choices] == texts
    assert alone.usage.completion_tokens == 0
    for text, one, other in zip(texts, answer.choices, alone.choices, strict=True):
        ids = tokenizer.encode(text)
        found = one.logprobs
        assert found.tokens == [*text, text[-1]]
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:-1] == [pytest.approx(logprob(each)) for each in ids[1:]]
        assert found.top_logprobs[0] is None
        assert text[1] in found.top_logprobs[1]
        assert found.text_offset == list(range(len(text) + 1))
        assert other.logprobs.token_logprobs == found.token_logprobs[:-1]


async def test_echo_without_logprobs_is_text_alone(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="abc", echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "abccba"


async def test_logprobs_of_a_prompt_too_long_for_one_message_are_refused(
    gateway: OpenGateway, router: ScriptedRouter
) -> None:
    router.max_context_len = 1 << 20
    body = {"model": MODEL, "prompt": [5] * 7000, "max_tokens": 1, "echo": True, "logprobs": 20}
    async with routing(router) as address, gateway(address) as running, httpx.AsyncClient() as http:
        answer = await http.post(f"http://{running.http_address}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")


async def test_others_have_their_turns_while_many_log_probabilities_are_written(tokenizer: ModelTokenizer) -> None:
    found = [TokenLogprobs(logprob=-1.0, top_token_ids=range(20), top_logprobs=[-2.0] * 20)] * 3000
    ids, turns = [40] * 3000, 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with background(neighbour(), "neighbour"):
        chat, completion = ChatLogprobs(tokenizer, 20), CompletionLogprobs.begin(tokenizer, 20)
        for write in (
            lambda: chat.add(ids, found),
            lambda: completion.add(ids, found),
            lambda: prompt_logprobs(tokenizer, [40, *ids], found, 20),
        ):
            turns = 0
            await write()
            assert turns > 3000 / 20
    assert json.loads(b"".join(pieces(chat.take())))["content"][2999]["top_logprobs"][19]["logprob"] == -2.0
    assert len(json.loads(b"".join(pieces(completion.take())))["text_offset"]) == 3000


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.gateway.tenants.admission.MAX_KEPT_BYTES", 1 << 18)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "path", ["/v1/completions", pytest.param("/v1/chat/completions", marks=pytest.mark.slow), "gRPC"]
)
async def test_answers_that_are_not_streamed_share_a_bounded_memory(
    running: RunningGateway, http: httpx.AsyncClient, stub: Stub, path: str
) -> None:
    pieces = running.core.admission._pieces

    async def ask(num_answers: int, *, stream: bool = False) -> bool:
        """Whether it is answered."""
        if path == "gRPC":
            options = generation_pb2.GenerationOptions(n=num_answers, logprobs=20, max_tokens=50)
            prompt = generation_pb2.TokenPrompt(token_ids=range(40, 90))
            request = generation_pb2.GenerateRequest(model=MODEL, tokens=prompt, options=options)
            try:
                if stream:
                    asked = generation_pb2.StreamGenerateRequest(request=request)
                    return all([each.id async for each in stub.StreamGenerate(asked)])
                return bool((await stub.Generate(request)).id)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "not streamed" in (error.details() or "")
                return False
        asked = {"prompt": "a" * 50, "logprobs": 20, "echo": True}
        if "chat" in path:
            asked = {"messages": [{"role": "user", "content": "a" * 50}], "logprobs": True, "top_logprobs": 20}
        body = {"model": MODEL, "n": num_answers, "max_tokens": 50, "stream": stream} | asked
        response = await http.post(path, json=body)
        if refused := response.status_code == 429:
            assert "not streamed" in response.json()["error"]["message"]
        return not refused and "error" not in response.text[-200:]

    assert await ask(1)
    assert not await ask(24)
    assert await ask(24, stream=True)
    with pieces.hold("another", 1.0, 4):
        assert not await ask(3)
    await until(lambda: pieces.taken == 0)
