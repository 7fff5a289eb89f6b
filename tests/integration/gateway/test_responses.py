"""`/v1/responses`, `/tokenize`, `/detokenize` and `/version`, through the stock client where it knows them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from outrider.errors import Unavailable
from outrider.gateway.generation.requests import ChatPrompt
from outrider.gateway.http.openai.responses_request import ResponsesRequest
from outrider.gateway.http.openai.schemas import parse
from outrider.gateway.tokenizer.model import ModelTokenizer

from tests.integration.gateway.conftest import Says, prompt_of
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, refusing

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SAID = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


async def test_a_whole_response_has_its_text_and_usage(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    says("Fine, thanks.")
    response = await client.responses.create(
        model=MODEL, input="How are you?", instructions="Be brief.", temperature=0, max_output_tokens=50
    )
    assert (response.output_text, response.status) == ("Fine, thanks.", "completed")
    assert response.usage.output_tokens == len(tokenizer.encode("Fine, thanks.")) + 1
    asked = router.requests[0]
    assert prompt_of(asked, tokenizer) == "system\nBe brief.\nuser\nHow are you?\nassistant\n"
    assert (asked.sampling.temperature, asked.stopping.max_new_tokens) == (0, 50)


async def test_a_stream_has_the_events_in_their_order(says: Says, client: openai.AsyncOpenAI) -> None:
    says(SAID)
    async with client.responses.stream(model=MODEL, input="Hm?", tools=[WEATHER]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type for event in events]
    once = list(dict.fromkeys(kinds))
    assert once == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text, call = final.output
    assert text.content[0].text == "Let me see."
    assert (call.name, call.arguments, call.type) == ("weather", '{"city": "Bern"}', "function_call")


async def test_a_whole_response_has_its_items_in_their_order(says: Says, client: openai.AsyncOpenAI) -> None:
    says(f"{SAID} Done.")
    whole = await client.responses.create(model=MODEL, input="Hm?", tools=[WEATHER])
    assert [item.type for item in whole.output] == ["message", "function_call", "message"]
    assert whole.output_text == "Let me see. Done."


async def test_a_response_that_is_cut_off_says_so(says: Says, client: openai.AsyncOpenAI) -> None:
    says("Fine, thanks.")
    whole = await client.responses.create(model=MODEL, input="Hm?", max_output_tokens=4)
    stream = await client.responses.create(model=MODEL, input="Hm?", max_output_tokens=4, stream=True)
    last = [event async for event in stream][-1]
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (last.type, last.response.output_text) == ("response.incomplete", "Fine")


async def test_what_came_of_calls_is_told_to_the_model(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    says(SAID)
    first = await client.responses.create(model=MODEL, input="Hm?", tools=[WEATHER])
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hm?"}]}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history += [{"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Sun"}]
    await client.responses.create(model=MODEL, input=history)
    prompt = prompt_of(router.requests[-1], tokenizer)
    assert prompt == f"user\nHm?\nassistant\n{SAID}\nuser\n<tool_response>\nSun\n</tool_response>\nassistant\n"


def test_all_reasoning_of_a_turn_is_told_to_the_model() -> None:
    def part(number: int) -> list[Any]:
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": f"Hm {number}."}]}
        return [thought, {"type": "function_call", "call_id": f"c{number}", "name": "weather", "arguments": "{}"}]

    body = {"model": MODEL, "input": [{"role": "user", "content": "a"}, *part(1), *part(2)]}
    [[generation]] = parse(ResponsesRequest, json.dumps(body).encode()).generations()
    assert isinstance(generation.prompt, ChatPrompt)
    turn = generation.prompt.messages[-1]
    assert turn["reasoning_content"] == "Hm 1.\nHm 2."
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]


async def test_a_format_is_a_grammar(says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
    named: Any = {"type": "function", "name": "weather"}
    says('{"a": 1}')
    response = await client.responses.create(model=MODEL, input="Hm?", text=form)
    called = await client.responses.create(model=MODEL, input="Hm?", tools=[WEATHER], tool_choice=named)
    assert response.output_text == '{"a": 1}'
    assert called.output[0].arguments == '{"a": 1}', "as the script says it"
    required = [json.loads(each.logits.grammar)["grammars"][0]["json_schema"]["required"] for each in router.requests]
    assert required == [["a"], ["city"]]


async def test_an_error_in_mid_stream_is_an_event(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    says("x")
    router.script = refusing(Unavailable("all targets are gone", reason="NO_TARGET"), after=2)
    stream = await client.responses.create(model=MODEL, input="Hm?", stream=True)
    events: list[Any] = []
    with pytest.raises(openai.APIError, match="all targets are gone"):
        async for event in stream:
            events.append(event)
            if event.type == "error":
                raise openai.APIError(event.message, None, body=None)  # type: ignore[arg-type]
    assert [event.sequence_number for event in events] == list(range(len(events)))


FUNCTION = {"type": "function", "name": "a", "parameters": {"type": "object"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "a", "input": "x"}]}, "input[0].type"),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[0].type"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "summary": {"a": 1}}]}, "input[0].summary"),
    ({"input": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, "input[0].tool_calls"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "n": 2}, "n"),
    ({"input": "a", "reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"input": "a", "include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include[1]"),
    ({"input": "a", "truncation": "some"}, "truncation"),
    *(
        ({"input": "a", "tools": [FUNCTION, {"type": kind, "name": "a"}]}, "tools[1].type")
        for kind in ("custom", "local_shell", "function2")
    ),
    ({"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "custom", "name": "a"}}, "tool_choice.type"),
    ({"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"input": "a", "tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
    ({"input": "a", "tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    ({"input": "a", "tools": [{"type": "namespace", "name": "a", "tools": [{}] * 129}]}, "tools[0].tools"),
    (
        {"input": "a", "tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]},
        "tools[0].tools[0].type",
    ),
    ({"input": "a", "text": {"fromat": {}}}, "text.fromat"),
    ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format.schema"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "mood": "good"}, "mood"),
    ({"input": "a" * 9000}, "input"),
]


async def test_what_is_not_served_is_refused_by_name(http: httpx.AsyncClient, router: ScriptedRouter) -> None:
    for body, param in REFUSED:
        answer = await http.post("/v1/responses", json={"model": MODEL} | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not router.requests


async def test_what_codex_and_agents_ask_for_besides_is_taken(says: Says, client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "store": True,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "max_tool_calls": 3,
        "service_tier": "priority",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
    }
    says("Hm.")
    response = await client.responses.create(
        model=MODEL, input="Hm?", **asked, extra_body={"client_metadata": {"a": "b"}}
    )
    assert response.output_text == "Hm."
    assert (response.truncation, response.reasoning.effort, response.model_extra.get("store")) == (
        *("auto", "medium"),
        False,
    )


async def test_tokens_of_a_text_and_of_a_chat_and_back(http: httpx.AsyncClient, tokenizer: ModelTokenizer) -> None:
    plain = (await http.post("/tokenize", json={"prompt": "a€", "return_token_strs": True})).json()
    message = {"role": "user", "content": "Hm?"}
    chat = (await http.post("/tokenize", json={"model": MODEL, "messages": [message]})).json()
    text = (await http.post("/detokenize", json={"model": MODEL, "tokens": chat["tokens"]})).json()
    both = await http.post("/tokenize", json={"prompt": "a", "messages": [message]})
    fields = {"add_generation_prompt": False, "chat_template_kwargs": {"a": 1}, "continue_final_message": False}
    closed = (await http.post("/tokenize", json={"messages": [message], **fields})).json()
    short = (await http.post("/detokenize", json={"tokens": closed["tokens"]})).json()
    unknown = await http.post("/detokenize", json={"tokens": [9999]})
    version = (await http.get("/version")).json()
    assert plain["tokens"] == tokenizer.encode("a€") and plain["count"] == 4
    assert (plain["max_model_len"], plain["token_strs"][0]) == (4096, "a")
    assert text["prompt"] == "<|im_start|>user\nHm?<|im_end|>\n<|im_start|>assistant\n"
    assert short["prompt"] == "<|im_start|>user\nHm?<|im_end|>\n"
    assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tokens[0]")
    assert version["version"]
