"""LiteLLM: chats, and its bridges of Anthropic's messages and of responses, over chats and over our own; its
error for a full context."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm

from tests.e2e.clients.common import ASKED, SCHEMA, TOO_LONG, TURNS, WEATHER, check, result_of, run

litellm.num_retries = 0
litellm.suppress_debug_info = True


def main(url: str, model: str) -> None:
    asked: dict[str, Any] = {"model": f"hosted_vllm/{model}", "api_base": url, "api_key": "none"}
    ours = {"model": f"anthropic/{model}", "api_base": url.removesuffix("/v1"), "api_key": "none"}
    for turn, how in ((chat, asked), (chat, ours), (messages, asked), (messages, ours), (responses, asked)):
        ASKED.clear()
        history: list[Any] = []
        check([turn(history, question, how) for question in TURNS])
    for stream in (False, True):
        try:
            litellm.completion(messages=[{"role": "user", "content": TOO_LONG}], stream=stream, **asked)
            raise AssertionError("a prompt that is too long was taken")
        except litellm.ContextWindowExceededError:
            pass


def chat(history: list[Any], question: str, asked: dict[str, Any]) -> str:
    history.append({"role": "user", "content": question})
    tools = [{"type": "function", "function": WEATHER}]
    while True:
        chunks = list(litellm.completion(messages=history, tools=tools, max_tokens=200, stream=True, **asked))
        message: Any = litellm.stream_chunk_builder(chunks, messages=history).choices[0].message
        history.append(message.model_dump())
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = result_of(call.function.arguments)
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


def messages(history: list[Any], question: str, asked: dict[str, Any]) -> str:
    history.append({"role": "user", "content": question})
    tools = [{"name": "weather", "description": "Now.", "input_schema": SCHEMA}]
    while True:
        making = litellm.anthropic.messages.acreate(messages=history, tools=tools, max_tokens=200, **asked)
        answer: Any = asyncio.run(making)
        history.append({"role": "assistant", "content": answer["content"]})
        uses = [part for part in answer["content"] if part["type"] == "tool_use"]
        if not uses:
            return str(answer["content"][0]["text"])
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": result_of(use["input"])} for use in uses
        ]
        history.append({"role": "user", "content": results})


def responses(history: list[Any], question: str, asked: dict[str, Any]) -> str:
    history.append({"type": "message", "role": "user", "content": question})
    while True:
        answer: Any = litellm.responses(input=history, tools=[{"type": "function", **WEATHER}], **asked)
        history += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output[-1].content[0].text)
        for call in calls:
            result = result_of(call.arguments)
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


if __name__ == "__main__":
    run(main)
