"""Usage for operators: the routers' ledger entries, summed by tenant and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from outrider.errors import InvalidRequest
from outrider.limits import MAX_LABEL_CHARS
from outrider.metadata.tenants.ledger import HOUR_S, KEPT_HOURS, LedgerStore, TenantUsage
from outrider.rpc.v1 import usage_pb2 as usage

MAX_ROWS = 10_000
_DAY_HOURS = 24


class Bills:
    def __init__(self, ledger: LedgerStore, wall_clock: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._wall_clock = wall_clock

    async def GetUsage(self, request: usage.GetUsageRequest, _: object) -> usage.GetUsageResponse:
        """Raises InvalidRequest, Unavailable."""
        if len(request.tenant) > MAX_LABEL_CHARS:
            raise InvalidRequest("tenant", f"must have at most {MAX_LABEL_CHARS} characters")
        if request.by not in usage.UsageInterval.values():
            raise InvalidRequest("by", f"{request.by} is not an interval")
        until_s = request.until_unix_s or int(self._wall_clock()) + 1
        since_s = request.since_unix_s or max(0, until_s - _DAY_HOURS * HOUR_S)
        if since_s >= until_s:
            raise InvalidRequest("since_unix_s", "must be before until_unix_s")
        first, last = since_s // HOUR_S, (until_s - 1) // HOUR_S
        if last - first > KEPT_HOURS:
            raise InvalidRequest(
                "since_unix_s", f"more than {KEPT_HOURS // _DAY_HOURS} days: no usage is kept for longer"
            )
        sums: dict[tuple[int, str, str], TenantUsage] = {}
        for entry in await self._ledger.read(first, last, request.tenant):
            key = _start(entry.hour, first, request.by), entry.tenant, entry.server
            sums.setdefault(key, TenantUsage()).add(entry.usage)
        if len(sums) > MAX_ROWS:
            raise InvalidRequest(
                "since_unix_s", f"{len(sums)} rows, more than {MAX_ROWS}: ask for less time or one tenant"
            )
        rows = [
            usage.UsageRow(start_unix_s=hour * HOUR_S, tenant=tenant, usage=_message(each), server=server)
            for (hour, tenant, server), each in sorted(sums.items(), key=lambda item: item[0])
        ]
        return usage.GetUsageResponse(rows=rows)


def _start(hour: int, first: int, by: usage.UsageInterval.ValueType) -> int:
    """The first hour of the interval that contains `hour`."""
    if by == usage.USAGE_INTERVAL_HOUR:
        return hour
    return hour - hour % _DAY_HOURS if by == usage.USAGE_INTERVAL_DAY else first


def _message(each: TenantUsage) -> usage.TenantUsage:
    numbers = {name: max(0, value) for name, value in asdict(each).items() if name != "sources"}
    sources = [usage.SourceUsage(source=source, **sums._asdict()) for source, sums in sorted(each.sources.items())]
    return usage.TenantUsage(**numbers, sources=sources)
