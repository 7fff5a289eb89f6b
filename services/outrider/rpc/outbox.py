"""What waits to be written to one peer: whole messages (`Outbox`), or items that go out together (`BatchingOutbox`)."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from outrider.errors import Overloaded

MAX_STREAM_BYTES = 1 << 20
"""Size at which a message on a stream of requests ends and the next begins."""
MAX_UNREAD_MESSAGES = 4096
"""Messages that wait for one peer. A peer that leaves more unread has stopped reading."""

M = TypeVar("M")


class Outbox(Generic[M]):
    """Messages of one stream, in order. No message may be lost: a stream whose peer does not read them ends."""

    def __init__(self, max_unread: int = MAX_UNREAD_MESSAGES) -> None:
        self.idle = asyncio.Event()
        """Set while everything that was put is written."""
        self.idle.set()
        self.unread = False
        """The peer has stopped reading."""
        self._max_unread = max_unread
        self._waiting: deque[M] = deque()
        self._filled, self._broken_off = asyncio.Event(), asyncio.Event()
        self._ended = False

    def put(self, message: M) -> None:
        """A message must not be changed after it is put."""
        self._waiting.append(message)
        self._filled.set()
        self.idle.clear()
        if len(self._waiting) > self._max_unread:
            self.unread = True
            self.break_off()

    async def take(self) -> M | None:
        """Waits for the next message; the last one has been written. None at the end."""
        while not self._waiting:
            self.idle.set()
            if self._ended:
                return None
            self._filled.clear()
            await self._filled.wait()
        return self._waiting.popleft()

    def clear(self) -> None:
        """Drops what waits: the stream has ended."""
        self._waiting.clear()
        self._broken_off.clear()
        self.unread = False

    def end(self) -> None:
        """Ends the stream once everything is written."""
        self._ended = True
        self._filled.set()

    def break_off(self) -> None:
        """Ends the stream at once."""
        self._broken_off.set()

    async def broken_off(self) -> None:
        """Raises Overloaded when the peer has stopped reading."""
        await self._broken_off.wait()
        if self.unread:
            raise Overloaded(f"{self._max_unread} messages are unread", reason="UNREAD")


class BatchingOutbox(Outbox[M]):
    """Everything that is added during a write goes out in the next message.

    A peer applies the fields of a message in an order of their own: opens first, closes last. So what is added for one
    sequence in the order open, (commits, settings), draft, close is applied in that order.
    """

    def __init__(self, message_type: type[M], max_bytes: int = MAX_STREAM_BYTES) -> None:
        super().__init__()
        self._type = message_type
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def put(self, message: M) -> None:
        super().put(message)
        # Nothing is added to a message that was put whole.
        self._num_bytes = self._max_bytes

    def last(self, num_bytes: int) -> M:
        """The message that goes out last, with room for so much more. To be filled at once: that saves a copy."""
        self._num_bytes += num_bytes
        if not self._waiting or self._num_bytes > self._max_bytes:
            self.put(self._type())
            self._num_bytes = num_bytes
        return self._waiting[-1]
