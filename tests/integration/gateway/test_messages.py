"""`/v1/messages` through Anthropic's own client, and as Claude Code asks.

The client is imported where it is used: that takes more than a second, and most processes only collect these tests.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from outrider.errors import Unavailable
from outrider.gateway.server import RunningGateway
from outrider.gateway.tokenizer.model import ModelTokenizer
from pydantic import BaseModel, TypeAdapter

from tests.integration.gateway.conftest import Says, prompt_of
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, refusing

HI: Any = {"role": "user", "content": "Hm?"}
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Now.", "input_schema": CITY}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
IGNORED = "x-outrider-ignored"


@dataclass
class Asking:
    """Anthropic's client and a plain one, of a gateway whose model says "Fine." or what it is told to."""

    library: Any
    client: Any
    http: httpx.AsyncClient
    router: ScriptedRouter
    tokenizer: ModelTokenizer
    says: Says

    async def create(self, **fields: Any) -> Any:
        return await self.client.messages.create(**{"model": MODEL, "max_tokens": 400, "messages": [HI], **fields})

    async def post(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "max_tokens": 400, "messages": [HI], **fields}
        return await self.http.post("/v1/messages", json=body)

    def prompt(self, number: int = -1) -> str:
        return prompt_of(self.router.requests[number], self.tokenizer)


@pytest.fixture
async def asking(
    running: RunningGateway, http: httpx.AsyncClient, router: ScriptedRouter, tokenizer: ModelTokenizer, says: Says
) -> AsyncIterator[Asking]:
    library = pytest.importorskip("anthropic")
    address = f"http://{running.http_address}"
    async with library.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client:
        says("Fine.")
        yield Asking(library, client, http, router, tokenizer, says)


# Whole answers


async def test_a_whole_answer_has_its_text_its_end_and_its_usage(asking: Asking, tokenizer: ModelTokenizer) -> None:
    asking.says("Fine, thanks.")
    answer = await asking.create(
        system="Be brief.", max_tokens=50, metadata={"user_id": "u"}, extra_body={"temperature": 0}
    )
    assert [block.model_dump() for block in answer.content] == [
        {"type": "text", "text": "Fine, thanks.", "citations": None}
    ]
    assert (answer.model, answer.role, answer.stop_reason, answer.stop_sequence) == (
        MODEL,
        "assistant",
        "end_turn",
        None,
    )
    assert answer.id.startswith("msg_") and answer._request_id
    [asked] = asking.router.requests
    usage = answer.usage
    assert usage.output_tokens == len(tokenizer.encode("Fine, thanks.")) + 1
    assert (usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens) == (
        len(asked.prompt_token_ids),
        3,
    )
    assert asking.prompt() == "system\nBe brief.\nuser\nHm?\nassistant\n"
    assert (asked.sampling.temperature, asked.stopping.max_new_tokens) == (0, 50)


async def test_every_option_of_sampling_reaches_the_router(asking: Asking) -> None:
    await asking.create(extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7.0})
    sampling = asking.router.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)


ENDS: list[tuple[str, bool, dict[str, Any], str, str | None]] = [
    ("Fine.", False, {}, "end_turn", None),
    ("Fine. END more", False, {"stop_sequences": ["Z", "END"]}, "stop_sequence", "END"),
    (CALL, False, {"tools": [WEATHER]}, "tool_use", None),
    ("Fine, thanks.", True, {"max_tokens": 4}, "max_tokens", None),
    ("Fine, thanks.", True, {"max_tokens": 20_000}, "model_context_window_exceeded", None),
]
"""What is said, whether that is cut off, of which request; and the reason of the end, with its stop sequence."""


async def test_the_reason_of_the_end_is_named(asking: Asking) -> None:
    for said, cut, fields, reason, stop in ENDS:
        asking.says(said, cut=cut)
        whole = await asking.create(**fields)
        async with asking.client.messages.stream(
            **{"model": MODEL, "max_tokens": 400, "messages": [HI], **fields}
        ) as stream:
            streamed = await stream.get_final_message()
        for answer in (whole, streamed):
            assert (answer.stop_reason, answer.stop_sequence) == (reason, stop), said


# Streams


@functools.cache
def event_type() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


@pytest.mark.parametrize("options", [{"reasoning_parsers": ("think",)}])
@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("Fine.", ["text"]),
        (f"Let me see.\n{CALL}{CLOCK_CALL}", ["text", "tool_use", "tool_use"]),
        (f"<think>Hm.</think>So.\n{CALL}", ["thinking", "text", "tool_use"]),
        (f"<think>Hm.</think>{CALL}", ["thinking", "tool_use"]),
        (f"So.\n{CALL}And{CLOCK_CALL}Done.", ["text", "tool_use", "text", "tool_use", "text"]),
        ("", []),
    ],
)
async def test_a_stream_has_anthropics_events_in_their_order_and_adds_up_to_the_whole(
    asking: Asking, said: str, kinds: list[str]
) -> None:
    fields: Any = {"tools": [WEATHER, CLOCK]}
    asking.says(said, size=400)
    whole = await asking.create(**fields)
    asking.says(said)
    raw = (await asking.post(stream=True, **fields)).text
    async with asking.client.messages.stream(model=MODEL, max_tokens=400, messages=[HI], **fields) as stream:
        final = await stream.get_final_message()
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in raw.strip().split("\n\n")]
    for each in events:
        data = json.loads(each["data"])
        assert data["type"] == each["event"]
        if data["type"] != "ping":
            event_type().validate_python(data, strict=True)
    names = list(dict.fromkeys(_named(event) for event in events))
    expected = ["message_start"]
    for i, kind in enumerate(kinds):
        delta = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}[kind]
        expected += [f"content_block_start {i} {kind}", *(["ping"] if i == 0 else [])]
        expected += [f"content_block_delta {i} {delta}"]
        expected += [f"content_block_delta {i} signature_delta"] if kind == "thinking" else []
        expected += [f"content_block_stop {i}"]
    assert names == [*expected, "message_delta", "message_stop"]
    assert [block.type for block in final.content] == kinds
    assert _plain(final) == _plain(whole)
    for block in final.content:
        if block.type == "tool_use":
            assert block.input == ({"city": "Bern"} if block.name == "weather" else {})


def _named(event: dict[str, str]) -> str:
    data = json.loads(event["data"])
    inner = data.get("content_block") or data.get("delta") or {}
    return " ".join(str(part) for part in (data["type"], data.get("index"), inner.get("type")) if part is not None)


def _plain(message: Any) -> Any:
    found = message.model_dump(exclude={"id": True, "parsed_output": True})
    for block in found["content"]:
        for name in ("id", "parsed_output"):
            block.pop(name, None)
    return found


async def test_an_error_in_mid_stream_is_anthropics_event(asking: Asking) -> None:
    asking.router.script = refusing(Unavailable("all targets are gone", reason="NO_TARGET"), after=2)
    with pytest.raises(asking.library.APIStatusError, match="all targets are gone") as caught:
        async with asking.client.messages.stream(model=MODEL, max_tokens=9, messages=[HI]) as stream:
            await stream.get_final_message()
    assert caught.value.body["error"]["type"] == "overloaded_error"


# What the model is told


def _text(text: str) -> Any:
    return {"type": "text", "text": text}


async def test_the_model_is_told_of_a_whole_conversation(asking: Asking) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sun."}], **CACHED},
        {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
        {"type": "text", "text": "And?"},
    ]
    messages: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "One", **CACHED}],
        },
        {"role": "user", "content": "Two"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                use,
                use | {"id": "toolu_2", "name": "clock", "input": {}},
            ],
        },
        {"role": "user", "content": results},
    ]
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abcde;"},
        {"type": "text", "text": "Be brief.", **CACHED},
        {"type": "text", "text": "Be kind."},
    ]
    answer = await asking.client.messages.with_raw_response.create(
        model=MODEL, max_tokens=9, messages=messages, system=system, tools=[WEATHER | CACHED, CLOCK]
    )
    prompt = asking.prompt()
    assert prompt.startswith("system\nBe brief.\nBe kind.\n\n# Tools")
    assert "cch=" not in prompt
    told = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY}}
    assert json.dumps(told) in prompt
    assert "user\n<reminder>\nOne\nTwo\nassistant\n" in prompt
    assert 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}' in prompt
    assert '{"name": "clock", "arguments": {}}' in prompt
    assert "<tool_response>\nSun.\n</tool_response>" in prompt and "<tool_response>\n\n</tool_response>" in prompt
    assert prompt.endswith("And?\nassistant\n")
    assert answer.headers[IGNORED] == "cache_control"


@pytest.mark.parametrize("template", ["{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"])
async def test_thinking_reaches_the_template(asking: Asking) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True "),
        ({"thinking": {"type": "disabled"}}, "False "),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, " high"),
        ({}, " "),
    ]
    for fields, shown in asked:
        answer = await asking.post(**fields)
        assert answer.status_code == 200, answer.text
        assert asking.prompt() == f"Hm? {shown}"
        assert ("budget_tokens" in answer.headers.get(IGNORED, "")) is ("budget" in str(fields))


# Tools


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_forced_call_is_a_tool_use(asking: Asking, choice: dict[str, Any]) -> None:
    named = choice["type"] == "tool"
    asking.says('{"city": "Bern"}' if named else '[{"name": "weather", "arguments": {"city": "Bern"}}]')
    answer = await asking.create(tools=[WEATHER, CLOCK], tool_choice=choice)
    [block] = answer.content
    assert (block.type, block.name, block.input, answer.stop_reason) == (
        "tool_use",
        "weather",
        {"city": "Bern"},
        "tool_use",
    )
    assert asking.router.requests[0].logits.grammar


async def test_tool_choice_none_and_one_call_at_a_time(asking: Asking) -> None:
    asking.says(CALL + CLOCK_CALL)
    none = await asking.create(tools=[WEATHER, CLOCK], tool_choice={"type": "none"})
    one = await asking.create(tools=[WEATHER, CLOCK], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert none.content[0].text == CALL + CLOCK_CALL and "weather" not in asking.prompt(0)
    assert [block.name for block in one.content if block.type == "tool_use"] == ["weather"]


async def test_a_call_that_is_cut_off_is_still_an_object(asking: Asking, tokenizer: ModelTokenizer) -> None:
    said = '{"city": "Ber'
    asking.says(said, cut=True)
    answer = await asking.create(
        tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}, max_tokens=len(tokenizer.encode(said))
    )
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].input == {"city": "Ber"}


async def test_tools_that_anthropics_servers_run_are_left_out_and_named(asking: Asking) -> None:
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    answer = await asking.post(tools=[hosted, WEATHER])
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "tools[0]"
    assert "web_search" not in asking.prompt()


async def test_a_schema_for_the_answer_is_a_grammar(asking: Asking) -> None:
    class City(BaseModel):
        city: str

    asking.says('{"city": "Bern"}')
    answer = await asking.client.messages.parse(model=MODEL, max_tokens=99, messages=[HI], output_format=City)
    assert answer.parsed_output == City(city="Bern")
    assert asking.router.requests[0].logits.grammar


# Refusals

BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [HI, {"role": "assistant", "content": "Well"}]}, "messages: ends with the assistant"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages[0].content[0].content[0].type: 'image' is not supported in what the tool says",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}, HI]},
        "messages[0].content[0].input",
    ),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": 3}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"temprature": 1}, "temprature"),
    ({"max_tokens": 2.5}, "max_tokens"),
]


async def test_what_is_wrong_is_refused_by_name(asking: Asking) -> None:
    answers = [await asking.post(**fields) for fields, _ in BAD]
    for answer, (_, named) in zip(answers, BAD, strict=True):
        assert answer.status_code == 400, answer.text
        error = answer.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert error["error"]["message"].startswith(named), error


async def test_errors_are_those_of_anthropics_client(asking: Asking) -> None:
    with pytest.raises(asking.library.NotFoundError) as unknown:
        await asking.create(model="nobody")
    with pytest.raises(asking.library.BadRequestError, match="maximum context length"):
        await asking.create(messages=[{"role": "user", "content": "a" * 9000}])
    version = await asking.http.post("/v1/messages", json={}, headers={"anthropic-version": "2023-01-01"})
    method, kind = await asking.http.get("/v1/messages"), await asking.http.post("/v1/messages", content=b"{}")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert [one.status_code for one in (version, method, kind)] == [400, 405, 415]
    assert all(one.json()["type"] == "error" for one in (version, method, kind))
    assert "anthropic-version" in version.text


async def test_every_version_of_the_api_since_named_events_is_taken(asking: Asking) -> None:
    for version in ({}, {"anthropic-version": "2023-06-01"}, {"anthropic-version": "2026-10-21"}):
        asking.http.headers.update(version)
        assert (await asking.post()).json()["content"] == [{"type": "text", "text": "Fine."}]


# Counting


async def test_the_number_of_tokens_is_that_of_the_prompt(asking: Asking) -> None:
    asked: Any = {"messages": [HI], "system": "Be brief.", "tools": [WEATHER], "thinking": {"type": "disabled"}}
    counted = await asking.client.messages.count_tokens(model=MODEL, **asked)
    await asking.create(**asked)
    bad = await asking.http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": [], "tools": [WEATHER]})
    same_name = await asking.http.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": [HI], "tools": [WEATHER, WEATHER]}
    )
    assert counted.input_tokens == len(asking.router.requests[0].prompt_token_ids)
    assert bad.status_code == 400 and bad.json()["error"]["message"].startswith("messages")
    assert same_name.json()["error"]["message"].startswith("tools[1].name")


async def test_the_models_are_listed_to_anthropics_client(asking: Asking) -> None:
    models = [model async for model in asking.client.models.list()]
    models.append(await asking.client.models.retrieve(MODEL))
    with pytest.raises(asking.library.NotFoundError) as unknown:
        await asking.client.models.retrieve("nobody")
    assert unknown.value.type == "not_found_error"
    assert [(model.id, model.type, model.max_input_tokens) for model in models] == [(MODEL, "model", 4096)] * 2
    assert models[1].display_name == MODEL and models[1].created_at == models[0].created_at


# A session

READ: Any = {"name": "Read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {}}}
BASH: Any = {"name": "Bash", "description": "Runs it.", "input_schema": CITY, "eager_input_streaming": True}
REMINDER = _text("<system-reminder>\nToday is Friday.\n</system-reminder>")


@pytest.mark.parametrize("options", [{"reasoning_parsers": ("think",)}])
async def test_a_session_of_three_turns_with_tools_as_claude_code_asks(asking: Asking) -> None:
    """Streamed, over the beta's path, with all that it sends of itself."""
    fixed: Any = {
        "model": MODEL,
        "max_tokens": 32_000,
        "system": [
            _text("x-anthropic-billing-header: cc_version=2.1.300; cc_entrypoint=cli; cch=0a1b2;"),
            _text("You are Claude Code.") | CACHED,
        ],
        "tools": [READ, BASH | CACHED],
        "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
    }
    said = [
        "<think>I read it.</think>I look.\n"
        + '<tool_call>\n{"name": "Read", "arguments": {"file": "a.py"}}\n</tool_call>',
        '<tool_call>\n{"name": "Bash", "arguments": {"city": "ls"}}\n</tool_call>\n' * 2,
        "It is done.",
    ]
    history: list[Any] = [
        {"role": "user", "content": [REMINDER, _text("Mend a.py.") | CACHED]},
        {"role": "system", "content": "Skills: none."},
    ]
    counted = await asking.client.beta.messages.count_tokens(
        **{name: fixed[name] for name in ("model", "system", "tools", "thinking")}, messages=history
    )
    for answer in said:
        asking.says(answer)
        async with asking.client.beta.messages.stream(messages=history, **fixed) as stream:
            message = await stream.get_final_message()
        history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        uses = [block for block in message.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": f"did {use.name}", "is_error": False}
            for use in uses
        ]
        assert message.stop_reason == ("tool_use" if uses else "end_turn")
        if uses:
            history.append({"role": "user", "content": [*results, REMINDER]})
    first, second, third = (asking.prompt(i) for i in range(3))
    assert counted.input_tokens == len(asking.router.requests[0].prompt_token_ids)
    assert second.startswith(first) and third.startswith(second)
    assert "did Read" in second and third.count("did Bash") == 2
    assert "billing" not in first and "I look." in second
    assert "Mend a.py.\n<system-reminder>\nSkills: none.\n</system-reminder>\nassistant\n" in first
    assert [block.text for block in message.content] == ["It is done."]
