"""The worker's lease and its part of the prefix index, where there is a metadata store. Redis is imported only then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from outrider.rpc.v1 import worker_pb2

if TYPE_CHECKING:
    from outrider.metadata import MetadataStore


class Announcer:
    """Says that the worker is there, and which prefixes it has cached."""

    def __init__(self, info: worker_pb2.WorkerInfo) -> None:
        self._info = info
        self._changes: asyncio.Queue[tuple[list[bytes], list[bytes]]] | None = None

    def changed(self, added: list[bytes], removed: list[bytes]) -> None:
        """Block hashes that came and went. Called in the event loop; never waits. Nobody hears it without a store."""
        if self._changes is not None:
            self._changes.put_nowait((added, removed))

    @asynccontextmanager
    async def announced(self, url: str, address: str, load: Callable[[], worker_pb2.WorkerLoad]) -> AsyncIterator[None]:
        """Holds the lease. Raises ValueError for what is no metadata URL; never because the store is away."""
        from outrider.metadata import MetadataStore

        async with MetadataStore.connect(url) as store, store.register(self._info, address, load):
            self._changes = asyncio.Queue()
            publisher = asyncio.create_task(self._publish(store, self._changes), name="publish prefixes")
            try:
                yield
            finally:
                self._changes = None
                publisher.cancel()
                with suppress(asyncio.CancelledError):
                    await publisher

    async def _publish(self, store: MetadataStore, changes: asyncio.Queue[tuple[list[bytes], list[bytes]]]) -> None:
        while True:
            added, removed = await changes.get()
            await store.publish_prefix(self._info.role, self._info.worker_id, added, removed)
