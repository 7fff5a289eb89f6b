"""The open streams of a worker's peers: each has a number, under which it is answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outrider.rpc.link import Over, answering
from outrider.rpc.outbox import MAX_UNREAD_MESSAGES, Outbox

A = TypeVar("A")


@dataclass(slots=True, eq=False)
class _Stream(Generic[A]):
    """The answering side of one peer's stream."""

    outbox: Outbox[A]
    answered_s: float
    """When the last message was queued, in seconds of the clock."""


class Streams(Generic[A]):
    """Lives in the event loop. A: answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.max_unread = MAX_UNREAD_MESSAGES
        self._clock = clock
        self._open: dict[int, _Stream[A]] = {}
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def open(self, context: Any) -> AsyncIterator[tuple[int, Over]]:
        """A new stream's number, which may be answered within the block; and what ends it, as `answering`."""
        number, outbox = next(self._numbers), Outbox[A](self.max_unread)
        self._open[number] = _Stream(outbox, self._clock())
        async with answering(context, outbox) as over:
            try:
                yield number, over
            finally:
                self._open.pop(number, None)

    def answer(self, number: int, answer: A) -> None:
        """Sends nothing if the stream has ended."""
        if (stream := self._open.get(number)) is None:
            return
        stream.answered_s = self._clock()
        stream.outbox.put(answer)
        if stream.outbox.unread:
            # The stream ends, and its peer continues its sequences elsewhere.
            del self._open[number]

    def unanswered(self, for_s: float) -> list[int]:
        now_s = self._clock()
        return [number for number, stream in self._open.items() if now_s - stream.answered_s >= for_s]

    def end(self) -> None:
        """Ends all streams. Their peers would keep them open."""
        for stream in self._open.values():
            stream.outbox.break_off()
        self._open.clear()

    async def flushed(self) -> None:
        """Returns when gRPC has taken every message made so far."""
        await asyncio.gather(*(stream.outbox.idle.wait() for stream in self._open.values()))
