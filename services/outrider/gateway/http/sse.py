"""Sends answers as server-sent events (WHATWG HTML, 9.2) or whole, and cancels them when the client disconnects."""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.types import Receive, Send

from outrider.gateway.generation.answers import Choices, Chunk
from outrider.gateway.generation.pacing import FRAME_BYTES, Pacer
from outrider.gateway.generation.stats import Usage
from outrider.gateway.http.errors import HttpError
from outrider.gateway.http.json_bytes import one_line, pieces
from outrider.gateway.http.openai.bodies import metrics, usage
from outrider.gateway.http.openai.schemas import GenerationBody, StreamOptions
from outrider.gateway.http.openai.shapes import AnswerShape, ChatShape, Choice, CompletionShape, Json

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Keeps proxies from buffering the stream into one late answer.
    (b"x-accel-buffering", b"no"),
]


ID_HEADERS = ("x-request-id", "request-id")
"""With the answer's id, as OpenAI's and as Anthropic's clients read it."""
COMMENT = b": waiting\n\n"
"""A line that clients skip, and that keeps what lies between from taking the connection for dead."""
COMMENT_EVERY_S = 15.0
_LOGPROB_BYTES = 192
_PART_BYTES = 1 << 16
OPEN_AFTER_S = 0.5
"""A refusal that takes less has its own status: the headers wait so long for the first event."""


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
        # An error is kept by its task, and keeps this frame.
        del working, leaving


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


OBFUSCATED_BYTES = 128
"""A chunk with obfuscation has a multiple of so many."""


def event(data: Json) -> bytes:
    return b"data: " + one_line(data) + b"\n\n"


async def send_whole(data: Json, answer_id: str, send: Send) -> None:
    """An answer in one body, which goes in parts: others have their turns in between."""
    parts = pieces(data)
    described = {"content-type": "application/json", "content-length": str(sum(map(len, parts)))}
    headers = [
        (name.encode(), value.encode()) for name, value in (described | dict.fromkeys(ID_HEADERS, answer_id)).items()
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        for start in range(0, len(part), _PART_BYTES):
            body = bytes(part[start : start + _PART_BYTES])
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(slots=True)
class AnswerEvents:
    """The events of one request, as they are sent. Counts them."""

    send: Send
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    num_events: int = 0
    opened: bool = False
    """Whether the headers, with status 200, have been sent."""
    _id: str = ""
    _said_s: float = 0.0

    @asynccontextmanager
    async def kept_open(self, choices: Choices) -> AsyncIterator[None]:
        """Within the block the headers are sent soon, and a comment whenever there was nothing to say for long."""
        self._id = choices.id
        keeping = asyncio.create_task(self._keep_open())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def say(self, data: bytes) -> None:
        await self._open()
        self.num_events += 1
        await self._write(data)

    async def close(self) -> None:
        await self._open()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_open(self) -> None:
        await self.sleep(OPEN_AFTER_S)
        await self._open()
        while True:
            left_s = self._said_s + COMMENT_EVERY_S - self.clock()
            await (self._write(COMMENT) if left_s <= 0 else self.sleep(left_s))

    async def _open(self) -> None:
        if self.opened:
            return
        self.opened, self._said_s = True, self.clock()
        headers = [*_HEADERS, *((name.encode(), self._id.encode()) for name in ID_HEADERS)]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, data: bytes) -> None:
        self._said_s = self.clock()
        await self.send({"type": "http.response.body", "body": data, "more_body": True})


@dataclass(slots=True)
class PacedStream(AnswerEvents):
    """Events as a stream of bytes: each beat sends equally many. A comment fills the frame where there are fewer."""

    beat_s: float = 0.0
    frame_bytes: int = FRAME_BYTES
    _pacer: Pacer = field(init=False)
    _unsent: bytearray = field(default_factory=bytearray)
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Something is to be sent, or nothing will be."""

    def __post_init__(self) -> None:
        self._pacer = Pacer(self.beat_s, self._send_frame, self.clock, self.sleep)

    @asynccontextmanager
    async def kept_open(self, choices: Choices) -> AsyncIterator[None]:
        """Within the block the headers are sent soon, and from then on a frame at each beat."""
        self._id, self.frame_bytes = choices.id, _frame_bytes(choices)
        async with self._pacer.beating():
            try:
                yield
            finally:
                self._begun.set()

    async def say(self, data: bytes) -> None:
        self._pacer.check()
        self.num_events += 1
        self._unsent += data
        self._begun.set()

    async def close(self) -> None:
        await self._open()
        while self._unsent:
            await self._pacer.beat()
        await AnswerEvents.close(self)

    async def _send_frame(self) -> None:
        if not self.opened:
            with suppress(TimeoutError):
                async with asyncio.timeout(OPEN_AFTER_S):
                    await self._begun.wait()
            if self._begun.is_set() and not self._unsent:
                # It has failed, with a status of its own.
                return
            await self._open()
        await self._write(take_frame(self._unsent, self.frame_bytes))


def take_frame(unsent: bytearray, size: int) -> bytes:
    """Takes `size` bytes from the front. If there are fewer, a comment or empty lines follow their last event."""
    data = bytes(unsent[:size])
    del unsent[:size]
    missing = size - len(data)
    return data + (b":%b\n\n" % (b" " * (missing - 3)) if missing >= 3 else b"\n" * missing)


def _frame_bytes(choices: Choices) -> int:
    """Room for a token of each answer, with its log probabilities."""
    options = choices.answers[0].options
    num_logprobs = (options.logprobs or 0) + 1 if options.shows_logprobs else 0
    return len(choices.answers) * (FRAME_BYTES + _LOGPROB_BYTES * num_logprobs)


async def events(choices: Choices, shape: AnswerShape, asked: StreamOptions) -> AsyncGenerator[bytes, None]:
    """The events of the answers, without [DONE]. Nothing is yielded before the first token or error."""
    include_usage = bool(asked.include_usage)
    writers: dict[int, Choice] = {}
    async with aclosing(choices.chunks()) as numbered:
        async for number, chunk in numbered:
            if number not in writers:
                writers[number] = shape.choice(number, choices.answers[number])
                if (opening := writers[number].opening) is not None:
                    yield event(shape.chunk(opening) | _usage_in_chunk(asked, choices, number))
            for piece in writers[number].pieces(await writers[number].read(chunk)):
                data = shape.chunk(piece) | _usage_in_chunk(asked, choices, number)
                data = data | metrics(choices) if piece["finish_reason"] and not include_usage else data
                yield event(obfuscated(data) if asked.include_obfuscation else data)
    if include_usage:
        yield event(shape.closing(_counted(choices, writers.values())) | metrics(choices))


def obfuscated(data: Json) -> Json:
    """The chunk with a field of random letters, as OpenAI adds it: its size, a multiple, tells little of its text."""
    bare = data | {"obfuscation": ""}
    return data | {"obfuscation": "".join(random.choices(string.ascii_letters, k=-len(event(bare)) % OBFUSCATED_BYTES))}


@dataclass(frozen=True, slots=True)
class ShapeWriter:
    shape: type[CompletionShape] | type[ChatShape]

    async def whole(self, choices: Choices, body: GenerationBody) -> Json:
        return await whole(choices, self._of(choices), body.num_choices)

    async def events(self, choices: Choices, body: GenerationBody) -> AsyncGenerator[bytes, None]:
        async with aclosing(events(choices, self._of(choices), body.stream_options or StreamOptions())) as found:
            async for each in found:
                yield each
        yield DONE

    def failed(self, error: HttpError, num_events: int) -> bytes:
        return event(error.body)

    def _of(self, choices: Choices) -> AnswerShape:
        return self.shape(choices.id, choices.model, int(time.time()))


def _usage_in_chunk(asked: StreamOptions, choices: Choices, number: int) -> Json:
    """With include_usage every chunk has the field, and only the last has a value (OpenAI API reference); others too
    with vLLM's continuous_usage_stats.
    """
    if asked.continuous_usage_stats:
        return {"usage": usage(choices.so_far(number))}
    return {"usage": None} if asked.include_usage else {}


async def whole(choices: Choices, shape: AnswerShape, num_choices: int) -> Json:
    """The answers in one body: for each prompt the `num_choices` with the highest mean logprob.

    If there are no more answers than that, all of them in their order.
    """
    writers = [shape.choice(number, answer) for number, answer in enumerate(choices.answers)]
    chunks: list[list[Chunk]] = [[] for _ in writers]
    logprobs = [0.0] * len(writers)
    async with aclosing(choices.chunks()) as numbered:
        async for number, chunk in numbered:
            logprobs[number] += sum(each.logprob for each in chunk.logprobs)
            before = writers[number].num_bytes
            chunks[number].append(await writers[number].read(chunk))
            choices.kept.add(writers[number].num_bytes - before)
    means = [sums / max(1, choices.so_far(number).completion_tokens) for number, sums in enumerate(logprobs)]
    kept = [writers[number] for number in _best(means, choices.per_prompt, num_choices)]
    written = []
    for index, writer in enumerate(kept):
        joined = Chunk.join(chunks[writer.index])
        writer.index = index
        written.append(writer.whole(joined))
    return shape.whole(written, _counted(choices, kept), kept[0].of_prompt) | metrics(choices)


def _counted(choices: Choices, writers: Iterable[Choice]) -> Usage:
    """To be called at the end."""
    return replace(choices.usage, reasoning_tokens=sum(writer.num_reasoning_tokens for writer in writers))


def _best(means: Sequence[float], per_prompt: int, num_choices: int) -> list[int]:
    """The numbers of the answers that are kept."""
    if num_choices == per_prompt:
        return list(range(len(means)))
    kept = []
    for start in range(0, len(means), per_prompt):
        kept += sorted(range(start, start + per_prompt), key=lambda number: -means[number])[:num_choices]
    return kept
