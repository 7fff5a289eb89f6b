"""`/v1/responses`: writes answers whole and as events (OpenAI API reference, Responses)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from outrider.gateway.generation.answers import Choices, Chunk
from outrider.gateway.generation.message_reader import MessageReader
from outrider.gateway.generation.stats import Usage
from outrider.gateway.http.errors import HttpError
from outrider.gateway.http.items import Item, Items, ItemStep
from outrider.gateway.http.json_bytes import one_line
from outrider.gateway.http.openai.bodies import metrics
from outrider.gateway.http.openai.responses_request import Namespaces, ResponsesRequest

Json = dict[str, Any]


_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""Names of the events of an item's text."""
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@dataclass(slots=True)
class _Output:
    """The output items and their events."""

    id: str
    namespaces: Namespaces
    row: Items = field(default_factory=Items)

    def events(self, steps: Iterable[ItemStep], status: str = "completed") -> Iterator[Json]:
        """`status`: that of items that end."""
        for step in steps:
            item, at = step.item, {"output_index": step.item.index}
            match step.kind:
                case "begin":
                    body = self._body(item, "in_progress")
                    yield {"type": "response.output_item.added", **at, "item": body}
                    if item.kind == "text":
                        yield {"type": "response.content_part.added", **self._place(item), "part": _part(item)}
                case "grow":
                    delta = {"delta": step.text, **_more(item)}
                    yield {"type": f"response.{_EVENTS[item.kind]}.delta", **self._place(item), **delta}
                case "end":
                    text = {"arguments" if item.kind == "call" else "text": item.text, **_more(item)}
                    yield {"type": f"response.{_EVENTS[item.kind]}.done", **self._place(item), **text}
                    if item.kind == "text":
                        yield {"type": "response.content_part.done", **self._place(item), "part": _part(item)}
                    yield {"type": "response.output_item.done", **at, "item": self._body(item, status)}

    def bodies(self, status: str) -> list[Json]:
        """The bodies of all items; `status` is that of the last one."""
        items = self.row.items
        return [self._body(item, status if item is items[-1] else "completed") for item in items]

    def _id(self, item: Item) -> str:
        return f"{_PREFIXES[item.kind]}_{self.id}_{item.index}"

    def _place(self, item: Item) -> Json:
        at = {"item_id": self._id(item), "output_index": item.index}
        return at if item.kind == "call" else at | {"content_index": 0}

    def _body(self, item: Item, status: str) -> Json:
        head = {"id": self._id(item), "status": status}
        if item.kind == "call":
            called = {"call_id": item.call_id, **self.namespaces.called(item.name), "arguments": item.text}
            return {"type": "function_call", **called, **head}
        content = [] if status == "in_progress" else [_part(item)]
        if item.kind == "reasoning":
            return {"type": "reasoning", "summary": [], "content": content, **head}
        return {"type": "message", "role": "assistant", "content": content, **head}


def _part(item: Item) -> Json:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}


def _more(item: Item) -> Json:
    """Further fields in the events of a message's text."""
    return {"logprobs": []} if item.kind == "text" else {}


class ResponsesWriter:
    async def whole(self, choices: Choices, body: ResponsesRequest) -> Json:
        reader, output = MessageReader.of(choices.answers[0]), _Output(choices.id, body.namespaces)
        async for chunk in choices.kept_chunks():
            reader.count(chunk)
            for _ in output.row.add(chunk.delta, reader):
                pass
        return _response(choices, body, output, int(time.time()), chunk, _counted(choices, reader)) | metrics(choices)

    async def events(self, choices: Choices, body: ResponsesRequest) -> AsyncGenerator[bytes, None]:
        """Nothing is yielded before the first token or error."""
        created_s, numbers = int(time.time()), count()
        reader, output, begun = MessageReader.of(choices.answers[0]), _Output(choices.id, body.namespaces), False

        def event(data: Json) -> bytes:
            numbered = data | {"sequence_number": next(numbers)}
            return _event(numbered)

        async for _, chunk in choices.chunks():
            if not begun:
                begun, nothing = True, _response(choices, body, output, created_s, None, None)
                yield event({"type": "response.created", "response": nothing})
                yield event({"type": "response.in_progress", "response": nothing})
            reader.count(chunk)
            for data in output.events(output.row.add(chunk.delta, reader)):
                yield event(data)
            if chunk.finish is not None:
                status = _status(chunk)
                for data in output.events(output.row.end(), status):
                    yield event(data)
                done = _response(choices, body, output, created_s, chunk, _counted(choices, reader))
                yield event({"type": f"response.{status}", "response": done | metrics(choices)})

    def failed(self, error: HttpError, num_events: int) -> bytes:
        described = {"message": error.message, "code": error.code, "param": error.param}
        return _event({"type": "error", "sequence_number": num_events, **described})


def _event(data: Json) -> bytes:
    return f"event: {data['type']}\ndata: ".encode() + one_line(data) + b"\n\n"


def _status(chunk: Chunk) -> str:
    return "incomplete" if chunk.finish is not None and chunk.finish.reason == "length" else "completed"


def _response(
    choices: Choices,
    body: ResponsesRequest,
    output: _Output,
    created_s: int,
    last: Chunk | None,
    counts: Usage | None,
) -> Json:
    """The response object; `last` is None while it is in progress."""
    status = "in_progress" if last is None else _status(last)
    options = choices.answers[0].options
    return {
        "id": f"resp_{choices.id}",
        "object": "response",
        "created_at": created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": choices.model,
        "output": output.bodies(status),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.effort, "summary": None},
        "store": False,
        "temperature": options.temperature,
        "text": {"format": body.format},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": options.top_p,
        "truncation": body.truncation or "disabled",
        "usage": counts and _usage(counts),
        "user": body.user,
        "metadata": body.metadata or {},
    } | ({} if last is None else last.signed)


def _counted(choices: Choices, reader: MessageReader) -> Usage:
    return replace(choices.usage, reasoning_tokens=reader.num_reasoning_tokens)


def _usage(counts: Usage) -> Json:
    return {
        "input_tokens": counts.prompt_tokens,
        # Writing to the cache has no price of its own here.
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
