"""Publishes the prefix cache's block hashes to the metadata store: off the token path, coalesced while the store is
slow."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outrider.rpc.v1 import worker_pb2
from outrider.runtime.supervision import stop

if TYPE_CHECKING:
    from outrider.metadata.store import MetadataStore


class PrefixPublisher:
    """Owned by one event loop. Without a store it does nothing."""

    def __init__(self, store: MetadataStore | None, info: worker_pb2.WorkerInfo) -> None:
        self._store = store
        self._info = info
        self._changes: dict[bytes, bool] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PrefixPublisher:
        if self._store is not None:
            self._task = asyncio.create_task(self._run(self._store), name="publish prefix")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await stop(self._task)

    def note(self, added: list[bytes], removed: list[bytes]) -> None:
        """Queues block hashes that were added and removed. Never waits."""
        if self._task is not None:
            self._changes.update(dict.fromkeys(added, True))
            self._changes.update(dict.fromkeys(removed, False))
            self._changed.set()

    async def _run(self, store: MetadataStore) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            changes, self._changes = self._changes, {}
            added = [block for block, present in changes.items() if present]
            removed = [block for block, present in changes.items() if not present]
            await store.publish_prefix(self._info.role, self._info.worker_id, added, removed)
