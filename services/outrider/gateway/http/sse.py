"""Answers while the client listens: as server-sent events (WHATWG HTML, 9.2), or whole; abandoned when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.types import Receive, Send

from outrider.gateway.generation import Answer
from outrider.gateway.http import bodies
from outrider.gateway.http.bodies import Json, Shape
from outrider.gateway.stats import Finish

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would turn a stream into one late answer.
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """The client closed the connection; nobody is there to be answered."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled the moment the client leaves. Raises ClientLeft then.

    To be called when the request's body has been read.
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
        # Awaited, so that nothing of the request is left running when the handler returns.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Json) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


async def events(answer: Answer, shape: Shape, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The events of one answer, [DONE] excluded. Nothing is yielded before the first token or error."""
    opened = False
    async for chunk in answer.chunks:
        if not opened:
            opened = True
            for data in shape.opening():
                yield event(_with_usage(data, include_usage))
        if chunk.text or chunk.finish:
            data = _with_usage(shape.piece(chunk.text, chunk.finish), include_usage)
            if chunk.finish and answer.include_metrics and not include_usage:
                data["metrics"] = bodies.metrics(chunk.finish.summary)
            yield event(data)
        if chunk.finish and include_usage:
            yield event(_closing(answer, shape, chunk.finish))


def _with_usage(data: Json, include_usage: bool) -> Json:
    """With include_usage every chunk has the field, and only the last has a value (OpenAI API reference)."""
    return data | {"usage": None} if include_usage else data


def _closing(answer: Answer, shape: Shape, finish: Finish) -> Json:
    data = shape.closing(finish)
    return data | {"metrics": bodies.metrics(finish.summary)} if answer.include_metrics else data


async def open_stream(send: Send, request_id: str) -> None:
    headers = [*_HEADERS, (b"x-request-id", request_id.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def close_stream(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def whole(answer: Answer, shape: Shape) -> Json:
    """The answer in one body."""
    text: list[str] = []
    async for chunk in answer.chunks:
        text.append(chunk.text)
        if chunk.finish:
            data = shape.whole("".join(text), chunk.finish)
            return data | {"metrics": bodies.metrics(chunk.finish.summary)} if answer.include_metrics else data
    raise RuntimeError("an answer ended without a finish")
