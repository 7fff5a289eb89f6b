"""Answers are what the types of OpenAI's own client say, checked strictly: the client itself takes anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.v1 import router_pb2, sequence_pb2
from pydantic import TypeAdapter

from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.scripted_router import EOS, MODEL, ScriptedRouter, routing, saying

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
ANSWERS = {
    "text": "Just a text.",
    "thought and call": f"<think>Hm.</think>Let me see.\n{CALL}\n{CALL}",
    "cut off": f"Wait. {CALL[:60]}",
    "no call": "Use <tool_call> tags.",
}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}}
MESSAGES = [{"role": "user", "content": "Hm?"}]


@pytest.fixture(params=sorted(ANSWERS))
async def http(
    request: pytest.FixtureRequest, gateway: OpenGateway, tokenizer: ModelTokenizer
) -> AsyncIterator[httpx.AsyncClient]:
    ids = tokenizer.encode(ANSWERS[request.param])
    cut = request.param == "cut off"
    finish = sequence_pb2.FINISH_REASON_LENGTH if cut else sequence_pb2.FINISH_REASON_STOP

    async def script(route: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        async for response in saying(ids if cut else [*ids, EOS], size=3, finish=finish)(route):
            yield response

    async with (
        routing(ScriptedRouter(script, max_context_len=4096)) as address,
        gateway(address, reasoning_parsers=("think",)) as running,
        httpx.AsyncClient(base_url=f"http://{running.http_address}/v1", timeout=60) as client,
    ):
        yield client


async def asked(http: httpx.AsyncClient, path: str, **body: Any) -> str:
    answer = await http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.text


def events(text: str) -> list[str]:
    """The data of each event, without [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line for line in lines if line != "[DONE]"]


async def test_chats(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "include_metrics": True}
    whole = ChatCompletion.model_validate_json(await asked(http, "/chat/completions", **body), strict=True)
    options = {"include_usage": True}
    streamed = events(await asked(http, "/chat/completions", **body, stream=True, stream_options=options))
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
    whole = Completion.model_validate_json(await asked(http, "/completions", **body), strict=True)
    streamed = events(await asked(http, "/completions", **body, stream=True))
    # OpenAI has no type of its own for chunks, in which the reason is null before the end.
    texts = [json.loads(each)["choices"][0]["text"] for each in streamed]
    assert "".join(texts) == whole.choices[0].text


async def test_responses(http: httpx.AsyncClient) -> None:
    body = {"input": "Hm?", "tools": [{"type": "function", **FUNCTION}]}
    whole = Response.model_validate_json(await asked(http, "/responses", **body), strict=True)
    streamed = events(await asked(http, "/responses", **body, stream=True))
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    found = [adapter.validate_json(each, strict=True) for each in streamed]
    last: Any = found[-1]
    assert [item.type for item in last.response.output] == [item.type for item in whole.output]
    assert last.response.output_text == whole.output_text
    assert [event.sequence_number for event in found] == list(range(len(found)))
