"""`/v1/messages`: writes answers whole and as events (Anthropic API reference, Messages, streaming)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from outrider.gateway.fields import from_json
from outrider.gateway.generation.answers import Choices, Chunk
from outrider.gateway.generation.message_reader import MessageReader
from outrider.gateway.generation.stats import Usage
from outrider.gateway.http.anthropic.request import MessagesRequest
from outrider.gateway.http.errors import HttpError
from outrider.gateway.http.items import Item, Items, ItemStep
from outrider.gateway.http.json_bytes import one_line
from outrider.gateway.http.openai.bodies import metrics
from outrider.rpc.v1 import router_pb2

Json = dict[str, Any]
_DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


class MessagesWriter:
    async def whole(self, choices: Choices, body: MessagesRequest) -> Json:
        reader, items = MessageReader.of(choices.answers[0]), Items()
        async for chunk in choices.kept_chunks():
            for _ in items.add(chunk.delta, reader):
                pass
        ended = _ended(chunk, items, choices.usage, body) | {"usage": _usage(choices.usage)}
        content = [_block(item) for item in items.items]
        return _message(choices, content) | ended | metrics(choices) | chunk.signed

    async def events(self, choices: Choices, body: MessagesRequest) -> AsyncGenerator[bytes, None]:
        """Nothing is yielded before the first token or error."""
        reader, items, begun = MessageReader.of(choices.answers[0]), Items(), False
        async for number, chunk in choices.chunks():
            if not begun:
                begun, message = True, _message(choices, [])
                yield _event({"type": "message_start", "message": message | {"usage": _usage(choices.so_far(number))}})
            for data in _written(items.add(chunk.delta, reader)):
                yield _event(data)
            if chunk.finish is not None:
                for data in _written(items.end()):
                    yield _event(data)
                delta = _ended(chunk, items, choices.usage, body)
                counted = {"usage": _usage(choices.usage)} | metrics(choices) | chunk.signed
                yield _event({"type": "message_delta", "delta": delta, **counted})
                yield _event({"type": "message_stop"})

    def failed(self, error: HttpError, num_events: int) -> bytes:
        return _event(error.anthropic_body)


def models(served: Iterable[router_pb2.ServedModel], created_s: int) -> Json:
    """The list of models, all on one page."""
    data = [model(each, created_s) for each in served]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}


def model(served: router_pb2.ServedModel, created_s: int) -> Json:
    return {
        "type": "model",
        "id": served.model,
        "display_name": served.model,
        "created_at": datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": served.max_context_len,
    }


def _event(data: Json) -> bytes:
    return f"event: {data['type']}\ndata: ".encode() + one_line(data) + b"\n\n"


def _written(steps: Iterable[ItemStep]) -> Iterator[Json]:
    for step in steps:
        item, at = step.item, {"index": step.item.index}
        match step.kind:
            case "begin":
                yield {"type": "content_block_start", **at, "content_block": _block(item)}
                if item.index == 0:
                    yield {"type": "ping"}
            case "grow":
                kind, name = _DELTAS.get(item.kind, ("input_json_delta", "partial_json"))
                yield {"type": "content_block_delta", **at, "delta": {"type": kind, name: step.text}}
            case "end":
                if item.kind == "reasoning":
                    yield {"type": "content_block_delta", **at, "delta": {"type": "signature_delta", "signature": ""}}
                yield {"type": "content_block_stop", **at}


def _block(item: Item) -> Json:
    match item.kind:
        case "reasoning":
            # Nothing is signed: reasoning is taken back as it is.
            return {"type": "thinking", "thinking": item.text, "signature": ""}
        case "text":
            return {"type": "text", "text": item.text}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": _input(item.text)}


def _input(arguments: str) -> Json:
    """As far as it came, if `max_tokens` has cut it off."""
    try:
        read = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _message(choices: Choices, content: list[Json]) -> Json:
    head = {"id": f"msg_{choices.id}", "type": "message", "role": "assistant", "model": choices.model}
    return head | {"content": content, "stop_reason": None, "stop_sequence": None}


def _ended(last: Chunk, items: Items, counts: Usage, body: MessagesRequest) -> Json:
    """Why the answer ended."""
    reason, stop = "end_turn", None
    if last.finish is not None and last.finish.reason == "length":
        reason = "max_tokens" if counts.completion_tokens >= body.max_tokens else "model_context_window_exceeded"
    elif any(item.kind == "call" for item in items.items):
        reason = "tool_use"
    elif last.finish is not None and isinstance(last.finish.matched_stop, str):
        reason, stop = "stop_sequence", last.finish.matched_stop
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(counts: Usage) -> Json:
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
    }
