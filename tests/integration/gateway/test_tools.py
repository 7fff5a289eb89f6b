"""Tools through the stock client: what reaches the model, and what comes back of its text, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from outrider.gateway.http.openai.tools import tool_use
from outrider.gateway.server import RunningGateway
from outrider.gateway.tokenizer.model import ModelTokenizer

from tests.integration.gateway.conftest import Says, prompt_of
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "strict": True}}
TOOLS = [WEATHER, CLOCK]
TOOLS_LOOSE: Any = [WEATHER, {"type": "function", "function": {"name": "clock"}}]
ASKED: Any = {"role": "user", "content": "Hm?"}
SAID = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
CALL = '{"name": "clock", "arguments": {}}'


async def test_a_call_in_a_whole_answer(says: Says, client: openai.AsyncOpenAI) -> None:
    says(SAID)
    answer = await client.chat.completions.create(model=MODEL, messages=[ASKED], tools=TOOLS)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", '{"city": "Bern"}')
    assert call.id.startswith("call_")


async def test_calls_in_a_stream_add_up_to_the_same(says: Says, client: openai.AsyncOpenAI) -> None:
    says(SAID + f"<tool_call>{CALL}</tool_call>")
    async with client.chat.completions.stream(model=MODEL, messages=[ASKED], tools=TOOLS_LOOSE) as stream:
        answer = await stream.get_final_completion()
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("weather", '{"city": "Bern"}'), ("clock", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_one_call_where_parallel_ones_are_not_wanted(says: Says, client: openai.AsyncOpenAI) -> None:
    says(f"<tool_call>{CALL}</tool_call>" * 2)
    answer = await client.chat.completions.create(model=MODEL, messages=[ASKED], tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1


async def test_without_tools_the_text_is_content(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    says(SAID)
    none = await client.chat.completions.create(model=MODEL, messages=[ASKED], tools=TOOLS, tool_choice="none")
    plain = await client.chat.completions.create(model=MODEL, messages=[ASKED], parallel_tool_calls=True)
    for answer in (none, plain):
        assert answer.choices[0].message.content == SAID
        assert (answer.choices[0].message.tool_calls, answer.choices[0].finish_reason) == (None, "stop")
    assert "weather" not in prompt_of(router.requests[0], tokenizer)


async def test_the_model_is_told_of_tools_calls_and_results(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "name": "Ann", "content": "Hm?"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
    ]
    says("Sun.")
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "Sun."
    prompt = prompt_of(router.requests[0], tokenizer)
    assert prompt.startswith("system\nBe brief.\n\n# Tools")
    assert json.dumps(WEATHER) in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>' in prompt
    assert "user\n<tool_response>\nSun\n</tool_response>" in prompt


async def test_what_an_agent_sends_back_of_answers_is_taken(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    """A thought without an answer, under both of its names; calls that are no JSON; and a tool that found nothing."""
    cut, python, text = (
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for arguments in ('{"city": "Be', '{"now": True}', '"Bern"')
    )
    messages: list[Any] = [
        ASKED,
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "assistant", "content": None, "reasoning": "Hm."},
        {"role": "assistant", "content": None, "tool_calls": [cut, python, text]},
        {"role": "tool", "tool_call_id": "c1", "content": []},
    ]
    says("Sun.")
    await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    prompt = prompt_of(router.requests[0], tokenizer)
    for arguments in ('{"city": "Be', '{"now": True}', '"Bern"'):
        assert f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>' in prompt
    assert "<tool_response>\n\n</tool_response>" in prompt


async def test_an_answer_in_the_parts_of_other_servers_is_one_prompt(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    """Agents that go from one server to another send on what they have of the first."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    parts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "zz"},
        {"type": "reasoning", "summary": [], "text": None},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
    ]
    messages: list[Any] = [ASKED, {"role": "assistant", "content": parts, "tool_calls": [call]}]
    plain: list[Any] = [ASKED, {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "Sun"}
    says("Sun.")
    for history in (messages, plain):
        await client.chat.completions.create(model=MODEL, messages=[*history, result], tools=TOOLS_LOOSE)
    with pytest.raises(openai.BadRequestError, match=r"content\[4\].type"):
        await client.chat.completions.create(model=MODEL, messages=[{**messages[1], "tool_calls": []}])
    first, second = (prompt_of(request, tokenizer) for request in router.requests)
    assert first.replace("Hm.", "") == second.replace("Hm.", "") and "zz" not in first


@pytest.mark.parametrize(
    ("choice", "means"),
    [
        ("any", "required"),
        ({"type": "any"}, "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_a_choice_in_the_words_of_other_servers_is_the_same_choice(choice: Any, means: Any) -> None:
    assert tool_use(TOOLS_LOOSE, choice, None) == tool_use(TOOLS_LOOSE, means, None)


async def test_a_required_call_is_a_grammar_and_is_read_as_one(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    pytest.importorskip("llguidance")
    says(f"[{CALL}]")
    whole = await client.chat.completions.create(
        model=MODEL, messages=[ASKED], tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    stream = await client.chat.completions.create(
        model=MODEL, messages=[ASKED], tools=TOOLS, tool_choice="required", stream=True
    )
    deltas = [chunk.choices[0].delta.tool_calls async for chunk in stream]
    assert whole.choices[0].finish_reason == "tool_calls"
    assert (whole.choices[0].message.content, whole.choices[0].message.tool_calls[0].function.name) == (None, "clock")
    assert next(delta[0].function.name for delta in deltas if delta) == "clock"
    one, several = (json.loads(each.logits.grammar)["grammars"][0]["json_schema"] for each in router.requests)
    names = [call["properties"]["name"]["const"] for call in several["items"]["anyOf"]]
    assert names == ["weather", "clock"]
    assert one["maxItems"] == 1 and "maxItems" not in several


async def test_a_named_call_is_its_arguments(says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter) -> None:
    pytest.importorskip("llguidance")
    named: Any = {"type": "function", "function": {"name": "weather"}}
    says('{"city": "Bern"}')
    answer = await client.chat.completions.create(
        model=MODEL, messages=[ASKED], tools=TOOLS, tool_choice=named, max_tokens=40
    )
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bern"}')
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(router.requests[0].logits.grammar)["grammars"][0]["json_schema"]["required"] == ["city"]


async def test_functions_are_called_and_read_back_as_clients_of_that_form_know_it(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    functions = [each["function"] for each in TOOLS_LOOSE]
    history: list[Any] = [ASKED]
    says(SAID)
    whole = await client.chat.completions.create(model=MODEL, messages=history, functions=functions)
    stream = await client.chat.completions.create(model=MODEL, messages=history, functions=functions, stream=True)
    deltas = [chunk.choices[0] async for chunk in stream]
    said = whole.choices[0].message
    history += [said.model_dump(exclude_none=True), {"role": "function", "name": "weather", "content": "Sun"}]
    await client.chat.completions.create(model=MODEL, messages=history, functions=functions)
    none = await client.chat.completions.create(
        model=MODEL, messages=[ASKED], functions=functions, function_call="none"
    )
    assert (whole.choices[0].finish_reason, said.content, said.tool_calls) == ("function_call", "Let me see.", None)
    assert (said.function_call.name, said.function_call.arguments) == ("weather", '{"city": "Bern"}')
    calls = [each.delta.function_call for each in deltas if each.delta.function_call]
    assert (calls[0].name, "".join(call.arguments for call in calls)) == ("weather", '{"city": "Bern"}')
    assert deltas[-1].finish_reason == "function_call" and not any(each.delta.tool_calls for each in deltas)
    prompt = prompt_of(router.requests[2], tokenizer)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>' in prompt
    assert "<tool_response>\nSun\n</tool_response>" in prompt
    assert none.choices[0].message.content == SAID


async def test_a_named_function_is_its_arguments(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter
) -> None:
    pytest.importorskip("llguidance")
    functions = [each["function"] for each in TOOLS_LOOSE]
    says('{"city": "Bern"}')
    answer = await client.chat.completions.create(
        model=MODEL, messages=[ASKED], functions=functions, function_call={"name": "weather"}
    )
    call = answer.choices[0].message.function_call
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
    assert answer.choices[0].finish_reason == "stop"
    assert "city" in router.requests[0].logits.grammar


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_tools_that_are_allowed_are_called(
    says: Says, client: openai.AsyncOpenAI, router: ScriptedRouter, tokenizer: ModelTokenizer, mode: str
) -> None:
    pytest.importorskip("llguidance")
    says(f"[{CALL}]" if mode == "required" else f"{SAID}<tool_call>{CALL}</tool_call>")
    tools = [{"type": "function", "function": {"name": "clock"}}]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    chat = await client.chat.completions.create(model=MODEL, messages=[ASKED], tools=TOOLS, tool_choice=allowed)
    flat = [{"type": "function", **each["function"]} for each in TOOLS]
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
    response = await client.responses.create(model=MODEL, input="Hm?", tools=flat, tool_choice=choice)
    assert [call.function.name for call in chat.choices[0].message.tool_calls] == ["clock"]
    assert [each.name for each in response.output if each.type == "function_call"] == ["clock"]
    for request in router.requests:
        assert "weather" not in prompt_of(request, tokenizer) + request.logits.grammar


ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ANSWER}}
STRICT: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}
LOOSE: Any = {"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}}


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD, BAD = call_of("weather", '{"city": "Bern"}'), call_of("weather", '{"city": 3}')


@pytest.fixture
def grammar_of(client: openai.AsyncOpenAI, router: ScriptedRouter) -> Any:
    async def asked(**fields: Any) -> str:
        await client.chat.completions.create(model=MODEL, messages=[ASKED], **fields)
        return str(router.requests[-1].logits.grammar)

    return asked


def takes(tokenizer: ModelTokenizer, grammar: str, text: str) -> bool:
    """Whether an answer may be this text, whole."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer(tokenizer.tokenizer.to_str()), grammar)
    return bool(matcher.consume_tokens(tokenizer.encode_plain(text)) and matcher.is_accepting())


async def test_a_strict_function_is_held_to_its_schema_where_the_model_decides(
    grammar_of: Any, tokenizer: ModelTokenizer
) -> None:
    pytest.importorskip("llguidance")
    grammar = await grammar_of(tools=[STRICT, LOOSE])
    for text in ("Just a text.", "a < b", GOOD, f"Let me see.\n{GOOD}\n{GOOD}", f"{GOOD} and then"):
        assert takes(tokenizer, grammar, text), text
    assert takes(tokenizer, grammar, call_of("clock", '{"city": 3}'))
    for text in (BAD, f"Hm. {BAD}", call_of("other", "{}"), "<tool_call>no"):
        assert not takes(tokenizer, grammar, text), text
    assert not await grammar_of(tools=[LOOSE])


async def test_with_tools_and_a_response_format_the_answer_is_either(
    grammar_of: Any, tokenizer: ModelTokenizer
) -> None:
    pytest.importorskip("llguidance")
    grammar = await grammar_of(tools=[STRICT], response_format=FORMAT)
    for text in ('{"sum":3}', GOOD, GOOD + GOOD):
        assert takes(tokenizer, grammar, text), text
    for text in ("Just a text.", '{"sum":"3"}', BAD, f'{{"sum":3}}{GOOD}', '{"sum":  3}'):
        assert not takes(tokenizer, grammar, text), text
    single = await grammar_of(tools=[STRICT], response_format=FORMAT, parallel_tool_calls=False)
    assert takes(tokenizer, single, GOOD)
    assert not takes(tokenizer, single, GOOD + GOOD)


async def test_a_call_that_has_to_come_goes_before_the_response_format(grammar_of: Any) -> None:
    pytest.importorskip("llguidance")
    forced = await grammar_of(tools=[STRICT], tool_choice="required")
    assert await grammar_of(tools=[STRICT], tool_choice="required", response_format=FORMAT) == forced


@pytest.mark.parametrize("options", [{"tool_call_parsers": (f"{MODEL}=llama3_json",), "reasoning_parsers": ("think",)}])
async def test_an_operator_may_say_how_a_model_writes_calls(
    says: Says, client: openai.AsyncOpenAI, running: RunningGateway
) -> None:
    says('{"name": "clock", "parameters": {}}')
    answer = await client.chat.completions.create(model=MODEL, messages=[ASKED], tools=TOOLS_LOOSE)
    with pytest.raises(openai.APIStatusError, match="llama3_json") as caught:
        await client.chat.completions.create(model=MODEL, messages=[ASKED], tools=TOOLS[:1], response_format=FORMAT)
    with pytest.raises(openai.APIStatusError, match="llama3_json") as strict:
        await client.chat.completions.create(model=MODEL, messages=[ASKED], tools=TOOLS)
    known = await running.core.catalog.get(MODEL)
    assert answer.choices[0].message.tool_calls[0].function.name == "clock"
    assert caught.value.body["param"].startswith("response_format")
    assert strict.value.body["param"] == "tools"
    assert known.tokenizer.reasons


@pytest.mark.parametrize(
    ("template", "param"),
    [
        ("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}", "tool_choice"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "tools"),
    ],
)
async def test_tools_that_the_model_would_not_see_or_whose_calls_cannot_be_read_are_refused(
    says: Says, client: openai.AsyncOpenAI, param: str, caplog: pytest.LogCaptureFixture
) -> None:
    says("Fine.")
    asked: Any = {"model": MODEL, "messages": [ASKED], "tools": TOOLS_LOOSE}
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**asked, tool_choice=choice)
        assert caught.value.body["param"] == param
    answer = await client.chat.completions.create(**asked, tool_choice="none")
    assert answer.choices[0].message.content == "Fine."
    assert "refused" in caplog.text, "the operator is told at the start"
