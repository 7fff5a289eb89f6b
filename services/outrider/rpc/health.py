"""grpc.health.v1 for callers who prove nothing: whoever watches is told of each change, and does not stay for ever."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import NotFound, Unavailable

MAX_WATCHES = 256
"""At once. One more ends the one that has lasted longest, so that nobody can hold all of them."""
MAX_WATCH_S = 600.0
"""A client that still wants to know watches again."""


class HealthService(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._watches: OrderedDict[asyncio.Timeout, None] = OrderedDict()

    def set(self, service: str, status: Any) -> None:
        self._statuses[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if (status := self._statuses.get(request.service)) is None:
            raise NotFound("no such service is served here")
        return health_pb2.HealthCheckResponse(status=status)

    # Written with `context.write`, as RouteMany.
    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        last = None
        async with self._watch():
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != last:
                    last = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await changed.wait()

    @asynccontextmanager
    async def _watch(self) -> AsyncIterator[None]:
        limit = asyncio.timeout(MAX_WATCH_S)
        try:
            async with limit:
                self._watches[limit] = None
                if len(self._watches) > MAX_WATCHES:
                    self._watches.popitem(last=False)[0].reschedule(0.0)
                yield
        except TimeoutError:
            raise Unavailable("watched for long enough: watch again", reason="WATCH_ENDED") from None
        finally:
            self._watches.pop(limit, None)
