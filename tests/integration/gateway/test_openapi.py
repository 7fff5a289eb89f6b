"""What the gateway answers is what the OpenAPI document says, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from outrider.errors import Unavailable

from docs import http_reference
from docs.http_reference import SCHEMAS, STREAMED, WHOLE
from tests.integration.gateway.conftest import Says, events_of
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, echoing, refusing

DOCUMENT = http_reference.openapi()
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
ASKED: Any = {"messages": [{"role": "user", "content": "Hm?"}]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LIMITED: Any = {**ASKED, "max_tokens": 400}


def wrong_with(name: str, data: Any) -> list[str]:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    found = jsonschema.Draft202012Validator(schema).iter_errors(data)
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter(echoing, max_context_len=4096)


async def events(client: httpx.AsyncClient, path: str, body: Any) -> list[Any]:
    answer = await client.post(path, json={"model": MODEL, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n") is (path not in (RESPONSES, MESSAGES))
    return list(map(json.loads, events_of(answer.text)))


ECHO = ""
"""The script that has log probabilities."""
ASKING = [
    (TEXT, {"prompt": "a"}, "plain"),
    (TEXT, {"prompt": "a", "include_metrics": True, "max_tokens": 4}, "plain"),
    (CHAT, ASKED, "plain"),
    (TEXT, {"prompt": "a", "receipt": True}, "plain"),
    (CHAT, {**ASKED, "receipt": True, "n": 2}, "plain"),
    (RESPONSES, {"input": "a", "receipt": True}, "plain"),
    (CHAT, {**ASKED, "include_metrics": True}, "plain"),
    (CHAT, {**ASKED, "tools": [TOOL]}, f"Let me see.\n{CALL}"),
    (CHAT, ASKED, "<think>Hm.</think>\nWell."),
    (TEXT, {"prompt": "ab", "logprobs": 2, "n": 2}, ECHO),
    (TEXT, {"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 1}, ECHO),
    (CHAT, {**ASKED, "logprobs": True, "top_logprobs": 2, "n": 2, "include_metrics": True}, ECHO),
    (RESPONSES, {"input": "a"}, "plain"),
    (RESPONSES, {"input": "a", "max_output_tokens": 16, "include_metrics": True}, "plain"),
    (RESPONSES, {"input": "a"}, "<think>Hm.</think>\nWell."),
    (MESSAGES, LIMITED, "plain"),
    (MESSAGES, {**LIMITED, "receipt": True, "include_metrics": True}, "<think>Hm.</think>\nWell."),
    (MESSAGES, {**LIMITED, "tools": [{"name": "weather", "input_schema": PARAMETERS}]}, f"So.\n{CALL}"),
    (RESPONSES, {"input": "a", "tools": [{"type": "function", **TOOL["function"], "strict": False}]}, f"So.\n{CALL}"),
]


@pytest.mark.parametrize("options", [{"reasoning_parsers": ("think",)}])
async def test_an_answer_and_each_event_of_a_stream_are_as_described(
    says: Says, http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    for path, body, text in ASKING:
        if text == ECHO:
            router.script = echoing
        else:
            says(text)
        whole = await http.post(path, json={"model": MODEL, **body})
        assert whole.status_code == 200, whole.text
        streamed = await events(http, path, body)
        if path in (CHAT, TEXT):
            streamed += await events(http, path, body | {"stream_options": {"include_usage": True}})
        assert wrong_with(WHOLE[path], whole.json()) == [], body
        assert len(streamed) > 1
        for data in streamed:
            assert wrong_with(STREAMED[path], data) == [], data


async def test_what_is_not_generated_is_as_described(http: httpx.AsyncClient) -> None:
    asked = {"/tokenize": {"prompt": "ab", "return_token_strs": True}, "/detokenize": {"tokens": [5, 6]}}
    asked["/v1/messages/count_tokens"] = {"model": MODEL, **ASKED}
    for route in sorted(set(WHOLE) - set(STREAMED)):
        path = route.replace("{name:path}", MODEL)
        answer = await (http.post(path, json=asked[route]) if route in asked else http.get(path))
        assert answer.status_code == 200, answer.text
        assert wrong_with(WHOLE[route], answer.json()) == [], route


@pytest.mark.parametrize(("path", "body"), [(TEXT, {"prompt": "ab"}), (CHAT, ASKED)])
async def test_what_is_told_of_a_prompt_is_as_described(http: httpx.AsyncClient, path: str, body: Any) -> None:
    answer = await http.post(path, json={"model": MODEL, "prompt_logprobs": 1, **body})
    assert answer.status_code == 200 and "prompt_logprobs" in answer.text
    assert wrong_with(WHOLE[path], answer.json()) == []


@pytest.mark.parametrize(("path", "body"), [(CHAT, ASKED), (RESPONSES, {"input": "a"}), (MESSAGES, LIMITED)])
async def test_an_error_in_mid_stream_is_as_described(
    router: ScriptedRouter, http: httpx.AsyncClient, path: str, body: Any
) -> None:
    router.script = refusing(Unavailable("all targets are gone", reason="NO_TARGET"), after=2)
    answer = await http.post(path, json={"model": MODEL, "stream": True, **body})
    last = json.loads(events_of(answer.text)[-1])
    assert "all targets are gone" in str(last)
    assert wrong_with("Error" if path == CHAT else STREAMED[path], last) == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_field_that_no_schema_knows_would_be_found(name: str) -> None:
    assert wrong_with(name, {"a_new_field": 1})
