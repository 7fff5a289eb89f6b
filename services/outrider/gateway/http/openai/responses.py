"""`/v1/responses`: writes answers whole and as events (OpenAI API reference, Responses)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from outrider.gateway.generation.choices import Choices
from outrider.gateway.generation.generation import Chunk
from outrider.gateway.generation.message_reader import MessageReader
from outrider.gateway.generation.stats import Usage
from outrider.gateway.http.errors import HttpError
from outrider.gateway.http.openai.choice_stats import ChoiceStats
from outrider.gateway.http.openai.responses_request import ResponsesRequest
from outrider.gateway.http.sse import one_line
from outrider.gateway.tools.parsers.tool_calls import Delta

Json = dict[str, Any]


@dataclass(slots=True)
class _Item:
    """One output item: reasoning, a message, or a call."""

    kind: str
    id: str
    index: int
    head: Json
    text: str = ""

    def body(self, status: str) -> Json:
        if self.kind == "function_call":
            return self.head | {"id": self.id, "type": self.kind, "arguments": self.text, "status": status}
        content = [] if status == "in_progress" else [self.part]
        return self.head | {"id": self.id, "type": self.kind, "content": content, "status": status}

    @property
    def part(self) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def event(self) -> str:
        """The event name of its deltas."""
        names = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
        return names[self.kind]

    @property
    def more(self) -> Json:
        """Further fields in the events of a message's text."""
        return {"logprobs": []} if self.kind == "message" else {}

    @property
    def place(self) -> Json:
        at = {"item_id": self.id, "output_index": self.index}
        return at if self.kind == "function_call" else at | {"content_index": 0}


@dataclass(slots=True)
class _Output:
    """The output items, one after the other; only the last one grows."""

    id: str
    items: list[_Item] = field(default_factory=list)

    def add(self, delta: Delta, reader: MessageReader) -> Iterator[Json]:
        """Adds a delta. Yields its events."""
        if delta.reasoning:
            yield from self._grow("reasoning", "rs", {"summary": []}, delta.reasoning)
        if delta.content:
            yield from self._grow("message", "msg", {"role": "assistant"}, delta.content)
        for each in delta.calls:
            call = reader.call(each)
            head = {"call_id": call["id"], "name": each.name} if "id" in call else None
            yield from self._grow("function_call", "fc", head or self.items[-1].head, each.arguments, new=bool(head))

    def close(self, status: str) -> Iterator[Json]:
        """Ends the last item, which may be incomplete. Yields its events."""
        if not self.items:
            return
        item = self.items[-1]
        text = {"arguments" if item.kind == "function_call" else "text": item.text}
        yield {"type": f"response.{item.event}.done", **item.place, **text, **item.more}
        if item.kind == "message":
            yield {"type": "response.content_part.done", **item.place, "part": item.part}
        yield {"type": "response.output_item.done", "output_index": item.index, "item": item.body(status)}

    def bodies(self, status: str) -> list[Json]:
        """The bodies of all items; `status` is that of the last one."""
        return [item.body(status if item is self.items[-1] else "completed") for item in self.items]

    def _grow(self, kind: str, prefix: str, head: Json, text: str, *, new: bool = False) -> Iterator[Json]:
        if new or not self.items or self.items[-1].kind != kind:
            yield from self.close("completed")
            item = _Item(kind, f"{prefix}_{self.id}_{len(self.items)}", len(self.items), head)
            self.items.append(item)
            yield {"type": "response.output_item.added", "output_index": item.index, "item": item.body("in_progress")}
            if kind == "message":
                yield {"type": "response.content_part.added", **item.place, "part": item.part}
        item = self.items[-1]
        item.text += text
        if text:
            yield {"type": f"response.{item.event}.delta", **item.place, "delta": text, **item.more}


class ResponsesWriter:
    async def whole(self, choices: Choices, body: ResponsesRequest) -> Json:
        stats = ChoiceStats(choices)
        chunks = []
        async for number, chunk in choices.chunks():
            stats.add(number, chunk)
            chunks.append(chunk)
        reader, output = MessageReader.of(choices.answers[0]), _Output(choices.id)
        joined = Chunk.join(chunks)
        reader.count(joined)
        for _ in output.add(joined.delta, reader):
            pass
        return _response(choices, body, output, int(time.time()), joined, _counted(stats, reader)) | stats.metrics

    async def events(self, choices: Choices, body: ResponsesRequest) -> AsyncGenerator[bytes, None]:
        """Nothing is yielded before the first token or error."""
        created_s, numbers, stats = int(time.time()), count(), ChoiceStats(choices)
        reader, output, begun = MessageReader.of(choices.answers[0]), _Output(choices.id), False

        def event(data: Json) -> bytes:
            numbered = data | {"sequence_number": next(numbers)}
            return _event(numbered)

        async for number, chunk in choices.chunks():
            stats.add(number, chunk)
            if not begun:
                begun, nothing = True, _response(choices, body, output, created_s, None, None)
                yield event({"type": "response.created", "response": nothing})
                yield event({"type": "response.in_progress", "response": nothing})
            reader.count(chunk)
            for data in output.add(chunk.delta, reader):
                yield event(data)
            if chunk.finish is not None:
                status = _status(chunk)
                for data in output.close(status):
                    yield event(data)
                done = _response(choices, body, output, created_s, chunk, _counted(stats, reader))
                yield event({"type": f"response.{status}", "response": done | stats.metrics})

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
    } | ({"receipt": last.receipt} if last is not None and last.receipt else {})


def _counted(stats: ChoiceStats, reader: MessageReader) -> Usage:
    return replace(stats.usage, reasoning_tokens=reader.num_reasoning_tokens)


def _usage(counts: Usage) -> Json:
    return {
        "input_tokens": counts.prompt_tokens,
        # Writing to the cache has no price of its own here.
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
