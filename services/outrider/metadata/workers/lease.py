"""A worker's lease: renewed every second, expired five seconds after the last renewal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Protocol

from outrider.metadata.workers.directory import LeaseRecord
from outrider.rpc.v1 import worker_pb2
from outrider.runtime.supervision import Backoff, keep_running, stop

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class LeaseWriter(Protocol):
    """The part of the store that a lease uses. Neither method raises while the store is unreachable."""

    def write_lease(self, record: LeaseRecord) -> Awaitable[None]: ...

    def remove_lease(self, lease: Lease) -> Awaitable[None]: ...


class Lease:
    """Held between `async with` and its end. Survives any outage of the store: the next heartbeat registers again."""

    def __init__(
        self,
        writer: LeaseWriter,
        info: worker_pb2.WorkerInfo,
        address: str,
        load: Callable[[], worker_pb2.WorkerLoad],
    ) -> None:
        self._writer = writer
        self.record = LeaseRecord(info, worker_pb2.WorkerLoad(), address, os.getpid())
        self._load = load
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Makes the next heartbeat due now, because the load has changed in a way that others should know soon."""
        self._wake.set()

    async def __aenter__(self) -> Lease:
        await self._beat()
        self._task = asyncio.create_task(self._run(), name=f"lease-{self.record.info.worker_id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._task)
        await self._writer.remove_lease(self)

    async def _run(self) -> None:
        # Continues after any error in a heartbeat, because without the next ones all others would lose this worker.
        await keep_running(self._beat_when_due, Backoff(HEARTBEAT_S, HEARTBEAT_S), self._failed)

    async def _beat_when_due(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._wake.wait()
        self._wake.clear()
        await self._beat()

    def _failed(self, error: Exception) -> None:
        logger.error("the lease of %s was not renewed", self.record.info.worker_id, exc_info=error)

    async def _beat(self) -> None:
        try:
            load = self._load()
        except Exception:
            # A worker without a known load is still alive.
            logger.exception("load of %s is unknown", self.record.info.worker_id)
            load = self.record.load
        self.record = LeaseRecord(self.record.info, load, self.record.address, self.record.pid)
        await self._writer.write_lease(self.record)
