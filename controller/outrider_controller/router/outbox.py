"""What waits to be written to one worker: everything pending goes out in one message."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from outrider.rpc.v1 import draft_pb2 as draft
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2 as target

M = TypeVar("M", draft.DraftRequest, target.VerifyRequest)


class Outbox(Generic[M]):
    """Messages of one stream, in order. Nothing is queued behind a write but what came during it.

    Within one message a worker applies opens first and closes last, so what is put for one sequence in the order
    open, (drafts or commits, settings), close is applied in that order.
    """

    def __init__(self, message_type: type[M], max_bytes: int) -> None:
        self._type: type[M] = message_type
        self._max_bytes = max_bytes
        self._messages: deque[M] = deque()
        self._tail_bytes = 0
        self._filled = asyncio.Event()

    def open(self, opening: sequence.OpenSequence) -> None:
        self._tail(opening.ByteSize()).opens.append(opening)

    def set(self, setting: sequence.SetSpeculation) -> None:
        self._tail(setting.ByteSize()).settings.append(setting)

    def close(self, closing: sequence.CloseSequence) -> None:
        self._tail(closing.ByteSize()).closes.append(closing)

    def put_draft(self: Outbox[target.VerifyRequest], item: sequence.Draft) -> None:
        self._tail(item.ByteSize()).drafts.append(item)

    def put_commit(self: Outbox[draft.DraftRequest], item: sequence.Commit) -> None:
        self._tail(item.ByteSize()).commits.append(item)

    async def take(self) -> M:
        """The next message; waits until there is one."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()

    def clear(self) -> None:
        """Forgets what was pending: its stream is gone."""
        self._messages.clear()

    def _tail(self, item_bytes: int) -> M:
        if not self._messages or self._tail_bytes + item_bytes > self._max_bytes:
            self._messages.append(self._type())
            self._tail_bytes = 0
            self._filled.set()
        self._tail_bytes += item_bytes
        return self._messages[-1]
