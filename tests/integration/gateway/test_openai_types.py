"""Answers are what the types of OpenAI's own client say, checked strictly: the client itself takes anything."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.integration.gateway.conftest import Says, events_of
from tests.integration.gateway.scripted_router import MODEL

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
ANSWERS = {
    "text": "Just a text.",
    "thought and call": f"<think>Hm.</think>Let me see.\n{CALL}\n{CALL}",
    "cut off": f"Wait. {CALL[:60]}",
    "no call": "Use <tool_call> tags.",
}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}}
MESSAGES = [{"role": "user", "content": "Hm?"}]


@pytest.fixture
def options() -> dict[str, Any]:
    return {"reasoning_parsers": ("think",)}


@pytest.fixture(params=sorted(ANSWERS), autouse=True)
def answer(request: pytest.FixtureRequest, says: Says) -> None:
    says(ANSWERS[request.param], cut=request.param == "cut off")


async def asked(http: httpx.AsyncClient, path: str, **body: Any) -> str:
    answer = await http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.text


async def test_chats(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "include_metrics": True}
    whole = ChatCompletion.model_validate_json(await asked(http, "/v1/chat/completions", **body), strict=True)
    options = {"include_usage": True}
    streamed = events_of(await asked(http, "/v1/chat/completions", **body, stream=True, stream_options=options))
    chunks = [ChatCompletionChunk.model_validate_json(each, strict=True) for each in streamed]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == (whole.choices[0].message.content or "")
    calls = [call.function.name for delta in deltas for call in delta.tool_calls or () if call.function]
    assert calls == [
        call.function.name for call in whole.choices[0].message.tool_calls or () if call.type == "function"
    ]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


async def test_completions(http: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "max_tokens": 400}
    whole = Completion.model_validate_json(await asked(http, "/v1/completions", **body), strict=True)
    streamed = events_of(await asked(http, "/v1/completions", **body, stream=True))
    # OpenAI has no type of its own for chunks, in which the reason is null before the end.
    texts = [json.loads(each)["choices"][0]["text"] for each in streamed]
    assert "".join(texts) == whole.choices[0].text


async def test_responses(http: httpx.AsyncClient) -> None:
    body = {"input": "Hm?", "tools": [{"type": "function", **FUNCTION}]}
    whole = Response.model_validate_json(await asked(http, "/v1/responses", **body), strict=True)
    streamed = events_of(await asked(http, "/v1/responses", **body, stream=True))
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    found = [adapter.validate_json(each, strict=True) for each in streamed]
    last: Any = found[-1]
    assert [item.type for item in last.response.output] == [item.type for item in whole.output]
    assert last.response.output_text == whole.output_text
    assert [event.sequence_number for event in found] == list(range(len(found)))
