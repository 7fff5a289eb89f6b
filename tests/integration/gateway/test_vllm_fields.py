"""Fields that clients of vLLM send, and OpenAI's do not know."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import tokenizer_pb2
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.integration.gateway.conftest import OpenGateway, prompt_of
from tests.integration.gateway.scripted_router import (
    MODEL,
    ScriptedRouter,
    echoing,
    logprob,
    routing,
    saying,
    tiny_tokenizer_bytes,
)

MARKS = ("<think>", "</think>", "<tool_call>")
THINKS = "{{ messages[0].content }}</think>{% if add_generation_prompt %}<think>\n{% endif %}"
ASKED: Any = [{"role": "user", "content": "Hm?"}]
SHOWS = "{{ messages[0].content }} {{ enable_thinking }} {{ effort }}"


@pytest.fixture
def router(template: str) -> ScriptedRouter:
    return ScriptedRouter(saying([40, 2]), max_context_len=100_000, tokenizer=tiny_tokenizer_bytes(template))


async def posted(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await client.post(f"/v1{path}", json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("template", [SHOWS])
async def test_variables_reach_the_chat_template(
    http: httpx.AsyncClient, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    chosen: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"enable_thinking": True, "effort": "high"}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    ]
    for fields in chosen:
        await posted(http, "/chat/completions", messages=ASKED, **fields)
    assert [prompt_of(each, tokenizer) for each in router.requests] == ["Hm? True high", "Hm? False ", "Hm? True "]


async def test_the_older_names_of_structured_output_ask_for_the_same(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    pytest.importorskip("llguidance")
    values = {"json": {"type": "integer"}, "regex": "a+", "choice": ["a", "b"], "grammar": 'start: "a"'}
    for name, value in values.items():
        await posted(http, "/completions", prompt="a", structured_outputs={name: value})
        await posted(http, "/completions", prompt="a", **{f"guided_{name}": value})
    grammars = [each.logits.grammar for each in router.requests]
    assert grammars[::2] == grammars[1::2] and all(grammars)


async def test_minus_one_is_no_limit_and_no_seed(http: httpx.AsyncClient, router: ScriptedRouter) -> None:
    await posted(http, "/completions", prompt="a", top_k=-1, seed=-1)
    assert (router.requests[0].sampling.top_k, router.requests[0].seeded) == (0, False)


async def test_logprobs_of_the_prompt_are_those_of_its_tokens_but_the_first(
    http: httpx.AsyncClient, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    router.script = echoing
    completion = await posted(http, "/completions", prompt=[70, 71, 72], prompt_logprobs=1, n=2, logprobs=0)
    bare = await posted(http, "/completions", prompt=[70, 71], prompt_logprobs=0)
    chat = await posted(http, "/chat/completions", messages=ASKED, prompt_logprobs=0, max_tokens=1)
    told = [(str(token_id), tokenizer.spell(token_id), rank) for token_id, rank in ((71, None), (72, 1))]
    for choice in completion["choices"]:
        nothing, second, _ = choice["prompt_logprobs"]
        assert nothing is None
        assert [(name, each["decoded_token"], each["rank"]) for name, each in second.items()] == told
        assert [each["logprob"] for each in second.values()] == pytest.approx([logprob(71), logprob(72)])
        # One of the prompt's likeliest, and none of the answer's.
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * len(choice["logprobs"]["tokens"])
    assert bare["choices"][0]["logprobs"] is None and list(bare["choices"][0]["prompt_logprobs"][1]) == ["71"]
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_logprobs_of_the_prompt_are_refused_by_name_where_they_cannot_be(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    router.script = echoing
    for fields in ({"stream": True}, {"prompt_logprobs": -1}, {"prompt_logprobs": 20, "prompt": [5] * 9000}):
        body = {"model": MODEL, "prompt": "a", "prompt_logprobs": 1} | fields
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs"), answer.text


async def test_a_text_that_the_models_tokenizer_cannot_split_is_refused_and_the_next_answered(
    gateway: OpenGateway,
) -> None:
    """`tokenizers` panics where its regular expression takes too many steps."""
    served = tokenizer_pb2.Tokenizer.FromString(tiny_tokenizer_bytes(SHOWS))
    backend = Tokenizer.from_buffer(served.json)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("(a+)+$"), "isolated")])
    served.json = backend.to_str().encode()
    text, short = 40 * "a" + "b", {"prompt": "b", "max_tokens": 1}
    predicted = {"messages": ASKED, "prediction": {"type": "content", "content": text}}
    async with (
        routing(ScriptedRouter(saying([40, 2]), tokenizer=served.SerializeToString())) as address,
        gateway(address) as running,
        httpx.AsyncClient(base_url=f"http://{running.http_address}") as http,
    ):
        for path, field, fields in (
            ("/v1/completions", "prompt", {"prompt": text}),
            ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/chat/completions", "prediction", predicted),
            ("/v1/completions", "bad_words", {**short, "bad_words": [text]}),
            ("/v1/responses", "input", {"input": text}),
            ("/tokenize", "prompt", {"prompt": text}),
        ):
            answer = await http.post(path, json={"model": MODEL, **fields})
            assert answer.status_code == 400, answer.text
            assert "cannot split it" in answer.text and field in answer.text
            await posted(http, "/completions", **short)


async def test_a_grammar_begins_where_the_thought_ends(gateway: OpenGateway) -> None:
    """The tokens of the thought are counted, and no part of the content."""
    pytest.importorskip("llguidance")
    served = tiny_tokenizer_bytes(THINKS, MARKS)
    thinking = ModelTokenizer.parse(served)
    said = thinking.encode_plain('Hm.</think>\n{"a": 1}')
    router = ScriptedRouter(saying([*said, 2], size=4), tokenizer=served)
    schema = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    async with (
        routing(router) as address,
        gateway(address) as running,
        httpx.AsyncClient(base_url=f"http://{running.http_address}") as http,
    ):
        chat = await posted(http, "/chat/completions", messages=ASKED, structured_outputs=schema)
        response = await posted(http, "/responses", input="Hm?", structured_outputs=schema)
        await posted(http, "/completions", prompt="a<think>", structured_outputs=schema, max_tokens=50)
    message = chat["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a": 1}')
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    first, second, plain = (each.logits.grammar for each in router.requests)
    assert first == second and "</think>" in first and "</think>" not in plain
