"""The open streams of a worker's peers: each has a number, under which it is answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from outrider.errors import Overloaded
from outrider.rpc.streams import GRACE_S, stop_writing, write_answers

A = TypeVar("A")

MAX_UNREAD_MESSAGES = 4096
"""Messages queued for one peer. A peer that leaves more unread has stopped reading."""


@dataclass(slots=True, eq=False)
class _Stream(Generic[A]):
    """The answering side of one peer's stream."""

    outbox: asyncio.Queue[A | None]
    answered_s: float
    """When the last message was queued, in seconds of the clock."""
    ending: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Expires when the worker ends the stream."""
    unread: bool = False
    """Its peer has stopped reading."""


class Streams(Generic[A]):
    """Lives in the event loop. A: answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.max_unread = MAX_UNREAD_MESSAGES
        self._clock = clock
        self._open: dict[int, _Stream[A]] = {}
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def open(self, context: Any) -> AsyncIterator[int]:
        """A new stream's number, which may be answered within the block. Ends the block with Overloaded when the peer
        has stopped reading."""
        number = next(self._numbers)
        stream = self._open[number] = _Stream(asyncio.Queue(self.max_unread), self._clock())
        writer = asyncio.create_task(write_answers(stream.outbox, context), name=f"write stream {number}")
        try:
            async with stream.ending:
                yield number
        except TimeoutError:
            if not stream.ending.expired():
                raise
            if stream.unread:
                raise Overloaded(f"{self.max_unread} messages are unread", reason="UNREAD") from None
        finally:
            self._open.pop(number, None)
            # A peer that does not read gets no time to read the rest.
            await stop_writing(writer, stream.outbox, None if stream.unread else GRACE_S)

    def answer(self, number: int, answer: A) -> None:
        """Sends nothing if the stream has ended."""
        if (stream := self._open.get(number)) is None:
            return
        stream.answered_s = self._clock()
        try:
            stream.outbox.put_nowait(answer)
        except asyncio.QueueFull:
            # No message of a stream may be lost: the stream ends, and its peer continues its sequences elsewhere.
            stream.unread = True
            self._end(number)

    def unanswered(self, for_s: float) -> list[int]:
        now_s = self._clock()
        return [number for number, stream in self._open.items() if now_s - stream.answered_s >= for_s]

    def end(self) -> None:
        """Ends all streams. Their peers would keep them open."""
        for number in list(self._open):
            self._end(number)

    def _end(self, number: int) -> None:
        self._open.pop(number).ending.reschedule(asyncio.get_running_loop().time())

    async def flushed(self) -> None:
        """Returns when gRPC has taken every message made so far."""
        await asyncio.gather(*(stream.outbox.join() for stream in self._open.values()))
