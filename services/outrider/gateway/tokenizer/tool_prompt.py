"""Writes tools into a conversation, in the words of Hermes's models, for a model whose chat template has no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# As Hermes and Qwen 2.5 were trained: NousResearch/Hermes-Function-Calling.
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def in_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with only roles and texts."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    described = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{described}"}, *plain[1:]]
    return [{"role": "system", "content": described}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return dict(message)
    written = [_written(call["function"]) for call in message["tool_calls"]]
    parts = [message["content"], *(f"<tool_call>\n{each}\n</tool_call>" for each in written)]
    return {"role": "assistant", "content": "\n".join(filter(None, parts))}


def _written(function: Mapping[str, Any]) -> str:
    """The call as the model wrote it; arguments that are no JSON object are a text."""
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, str):
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with an object as the arguments of every call, for templates that read their members."""
    return [
        {**message, "tool_calls": [{**call, "function": _object(call["function"])} for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": {"arguments": arguments} if isinstance(arguments, str) else arguments}
