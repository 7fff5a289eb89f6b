"""LiteLLM: three turns with its own form of our answers, streams, its error for a full context, and its bridges.

The bridges are the ways in which Claude Code (`/v1/messages`) and Codex (`/v1/responses`) reach other servers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm

from tests.e2e.clients.common import MAX_TOKENS, QUESTION, TOO_LONG, TOOL, WEATHER, run

litellm.num_retries = 0
litellm.suppress_debug_info = True
USER = {"role": "user", "content": QUESTION}
PROVIDERS = ("openai", "hosted_vllm")


def main(url: str, model: str) -> None:
    for provider in PROVIDERS:
        asked: dict[str, Any] = {"model": f"{provider}/{model}", "api_base": url, "api_key": "none"}
        turns(asked)
        context(asked)
        asyncio.run(messages(asked))
        codex(asked)


def turns(asked: dict[str, Any]) -> None:
    first = litellm.completion(messages=[USER], tools=[TOOL], tool_choice="required", **asked).choices[0]
    assert first.finish_reason == "tool_calls", first
    history: list[Any] = [USER, first.message.model_dump()]
    history += [{"role": "tool", "tool_call_id": call.id, "content": "Sun."} for call in first.message.tool_calls]
    second = litellm.completion(messages=history, tools=[TOOL], max_tokens=MAX_TOKENS, **asked).choices[0]
    history += [second.message.model_dump(), USER]
    stream = litellm.completion(messages=history, max_tokens=MAX_TOKENS, stream=True, **asked)
    chunks = list(stream)
    whole = litellm.stream_chunk_builder(chunks, messages=history)
    assert whole.choices[0].message.content and whole.choices[0].finish_reason in ("stop", "length"), whole


def context(asked: dict[str, Any]) -> None:
    for stream in (False, True):
        try:
            litellm.completion(messages=[{"role": "user", "content": TOO_LONG}], stream=stream, **asked)
            raise AssertionError("a prompt that is too long was taken")
        except litellm.ContextWindowExceededError:
            pass


async def messages(asked: dict[str, Any]) -> None:
    """As Claude Code asks: system as parts, cache marks everywhere, tools with input_schema, its answer sent back."""
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "weather", "description": "Now.", "input_schema": WEATHER["parameters"], **cached}
    common = {"max_tokens": 64, "system": [{"type": "text", "text": "Be brief.", **cached}], "tools": [tool]}
    user = {"role": "user", "content": [{"type": "text", "text": QUESTION, **cached}]}
    first: Any = await litellm.anthropic.messages.acreate(
        messages=[user], tool_choice={"type": "any"}, metadata={"user_id": "u"}, **common, **asked
    )
    uses = [part for part in first["content"] if part["type"] == "tool_use"]
    assert uses and uses[0]["input"]["city"] in ("Bern", "Rome"), first
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "Sun.", **cached} for use in uses]
    history = [user, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    stream: Any = await litellm.anthropic.messages.acreate(
        messages=history, stream=True, **{**common, "max_tokens": MAX_TOKENS}, **asked
    )
    events = b"".join([event if isinstance(event, bytes) else event.encode() async for event in stream])
    assert b"message_stop" in events, events


def codex(asked: dict[str, Any]) -> None:
    """As Codex asks: instructions, a list of items, reasoning, no storage, and what is to be included."""
    common: dict[str, Any] = {
        "instructions": "Be brief.",
        "tools": [{"type": "function", "strict": False, **WEATHER}],
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        **asked,
    }
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    first: Any = litellm.responses(input=[user], tool_choice="required", **common)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Bern", "Rome")
    history = [
        user,
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."},
    ]
    stream: Any = litellm.responses(
        input=history, tool_choice="auto", stream=True, max_output_tokens=MAX_TOKENS, **common
    )
    kinds = [str(getattr(event.type, "value", event.type)) for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds


if __name__ == "__main__":
    run(main)
