"""Sends answers as server-sent events (WHATWG HTML, 9.2) or whole, and cancels them when the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.types import Receive, Send

from outrider.gateway.choices import Choices
from outrider.gateway.generation import Chunk
from outrider.gateway.http.choice_stats import ChoiceStats
from outrider.gateway.http.errors import HttpError
from outrider.gateway.http.schemas import GenerationBody
from outrider.gateway.http.shapes import ChatShape, Choice, CompletionShape, Json, Shape
from outrider.gateway.stats import Usage

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Keeps proxies from buffering the stream into one late answer.
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """The client has closed the connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Cancels `work` and raises ClientLeft when the client disconnects.

    To be called after the request's body has been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        working.cancel()
        leaving.cancel()
        # Awaited, so that nothing of the request still runs when the handler returns.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Json) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


async def events(choices: Choices, shape: Shape, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The events of the answers, without [DONE]. Nothing is yielded before the first token or error."""
    writers: dict[int, Choice] = {}
    stats = ChoiceStats(choices)
    async for number, chunk in choices.chunks():
        if number not in writers:
            writers[number] = shape.choice(number, choices.answers[number])
            for data in shape.opening(number):
                yield event(_with_usage(data, include_usage))
        stats.add(number, chunk)
        written = writers[number].write(chunk)
        if written.adds:
            data = _with_usage(shape.piece(written), include_usage)
            yield event(data if include_usage else data | stats.metrics)
    if include_usage:
        yield event(shape.closing(_counted(stats, writers.values())) | stats.metrics)


@dataclass(frozen=True, slots=True)
class ShapeWriter:
    """Writes the answers of an endpoint with choices."""

    shape: type[CompletionShape] | type[ChatShape]

    async def whole(self, choices: Choices, body: GenerationBody) -> Json:
        return await whole(choices, self._of(choices), body.num_choices)

    async def events(self, choices: Choices, body: GenerationBody) -> AsyncGenerator[bytes, None]:
        async with aclosing(events(choices, self._of(choices), include_usage=body.include_usage)) as found:
            async for each in found:
                yield each
        yield DONE

    def failed(self, error: HttpError, num_events: int) -> bytes:
        return event(error.body)

    def _of(self, choices: Choices) -> Shape:
        return self.shape(choices.id, choices.model, int(time.time()))


def _with_usage(data: Json, include_usage: bool) -> Json:
    """With include_usage every chunk has the field, and only the last has a value (OpenAI API reference)."""
    return data | {"usage": None} if include_usage else data


async def open_stream(send: Send, request_id: str) -> None:
    headers = [*_HEADERS, (b"x-request-id", request_id.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def close_stream(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def whole(choices: Choices, shape: Shape, num_choices: int) -> Json:
    """The answers in one body: for each prompt the `num_choices` with the highest mean logprob.

    If there are no more answers than that, all of them in their order.
    """
    chunks: list[list[Chunk]] = [[] for _ in choices.answers]
    stats = ChoiceStats(choices)
    async for number, chunk in choices.chunks():
        stats.add(number, chunk)
        chunks[number].append(chunk)
    kept = _best([Chunk.join(of_one) for of_one in chunks], choices.per_prompt, num_choices)
    writers = [shape.choice(index, choices.answers[number]) for index, (number, _) in enumerate(kept)]
    written = [writer.write(chunk) for writer, (_, chunk) in zip(writers, kept, strict=True)]
    return shape.whole(written, _counted(stats, writers)) | stats.metrics


def _counted(stats: ChoiceStats, writers: Iterable[Choice]) -> Usage:
    """To be called at the end."""
    return replace(stats.usage, reasoning_tokens=sum(writer.num_reasoning_tokens for writer in writers))


def _best(answers: list[Chunk], per_prompt: int, num_choices: int) -> list[tuple[int, Chunk]]:
    numbered = list(enumerate(answers))
    if num_choices == per_prompt:
        return numbered
    kept = []
    for start in range(0, len(numbered), per_prompt):
        kept += sorted(numbered[start : start + per_prompt], key=lambda pair: -_mean_logprob(pair[1]))[:num_choices]
    return kept


def _mean_logprob(answer: Chunk) -> float:
    return sum(each.logprob for each in answer.logprobs) / max(1, len(answer.logprobs))
