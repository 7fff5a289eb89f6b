"""Messages that wait to be written to one worker: everything pending is sent in one message."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from outrider.rpc.v1 import draft_pb2 as draft
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2 as target

M = TypeVar("M", draft.DraftRequest, target.VerifyRequest)


class Outbox(Generic[M]):
    """Messages of one stream, in order. Everything that is put during a write goes into the next message.

    Within one message a worker applies opens first and closes last, so items that are put for one sequence in the order
    open, (commits, settings), draft, close are applied in that order. An item must not be changed after it is put.
    """

    def __init__(self, message_type: type[M], max_bytes: int) -> None:
        self._type: type[M] = message_type
        self._max_bytes = max_bytes
        # By name of the field, in the order of application.
        self._pending: dict[str, list[Any]] = {name: [] for name in message_type.DESCRIPTOR.fields_by_name}
        self._filled = asyncio.Event()

    def open(self, opening: sequence.OpenSequence) -> None:
        self._put("opens", opening)

    def set(self, setting: sequence.SetSpeculation) -> None:
        self._put("settings", setting)

    def close(self, closing: sequence.CloseSequence) -> None:
        self._put("closes", closing)

    def set_draft(self: Outbox[target.VerifyRequest], change: target.SetDraft) -> None:
        self._put("set_drafts", change)

    def erase(self: Outbox[target.VerifyRequest], erasure: target.EraseHistoryRequest) -> None:
        self._put("erasures", erasure)

    def commit(self: Outbox[draft.DraftRequest], commit: sequence.Commit) -> None:
        self._put("commits", commit)

    async def take(self) -> M:
        """Waits for the next message and returns it."""
        await self._filled.wait()
        # Built at once: adding items one by one as they come would take twice as long.
        message = self._type(**self._pending)
        if message.ByteSize() > self._max_bytes:
            return self._part()
        self.clear()
        return message

    def clear(self) -> None:
        """Drops the pending items, which were written or whose stream has ended."""
        for items in self._pending.values():
            items.clear()
        self._filled.clear()

    def _put(self, name: str, item: Any) -> None:
        self._pending[name].append(item)
        self._filled.set()

    def _part(self) -> M:
        """As many items as a message may hold, in the order of application; at least one. The others stay pending."""
        message, num_bytes = self._type(), 0
        for name, items in self._pending.items():
            taken = 0
            for item in items:
                num_bytes += item.ByteSize()
                if num_bytes > self._max_bytes and message.ListFields():
                    break
                getattr(message, name).append(item)
                taken += 1
            del items[:taken]
            if items:
                return message
        self._filled.clear()
        return message
