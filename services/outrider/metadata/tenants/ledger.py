"""The usage of tenants in Redis: one hash per hour and router, kept for 90 days.

A router writes absolute sums, so it can repeat a write whose answer was lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.metadata.connection.part import StorePart
from outrider.metadata.connection.reading import reading

if TYPE_CHECKING:
    from redis.asyncio import Redis

HOUR_S = 3600
ATTACHED = "attached:"
"""Before a writer's name: a ledger of what attached servers say, by tenant and server. It is no tenant's own bill."""
KEPT_HOURS = 90 * 24
# Most in one call, as each call has a timeout of a second.
_MAX_TENANTS, _MAX_LEDGERS = 1000, 100
_MAX_SOURCES = 16
_MAX_SUM = 1 << 53
"""No hour has more of anything."""
_MAX_NAMED = 5


class SourceSums(NamedTuple):
    """Of one source of drafts. The names are those of outrider.rpc.v1.SourceUsage."""

    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    target_us: int = 0
    draft_us: int = 0


@dataclass(slots=True)
class TenantUsage:
    """Sums, with the field names of outrider.rpc.v1.TenantUsage."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    target_useful_us: int = 0
    target_wasted_us: int = 0
    draft_useful_us: int = 0
    draft_wasted_us: int = 0
    """Negative for a moment if accepted tokens were counted as wasted before."""
    sources: dict[str, SourceSums] = field(default_factory=dict)
    """By source of drafts."""

    def add(self, other: TenantUsage) -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for source, sums in other.sources.items():
            self.drafted(source, sums)

    def drafted(self, source: str, more: SourceSums) -> None:
        """Adds what a source did in a step. Draft workers choose the names of theirs: only so many are kept."""
        if not source or (source not in self.sources and len(self.sources) >= _MAX_SOURCES):
            source = "other"
        sums = self.sources.get(source, SourceSums())
        # A new one: copies of a bill share it.
        self.sources = {**self.sources, source: SourceSums(*map(add, sums, more))}


_NUMBERS = tuple(each.name for each in fields(TenantUsage) if each.name != "sources")
_FIELDS = (*_NUMBERS, "sources")


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The usage of one tenant in one hour by one router."""

    hour: int
    """Hours since 1970."""
    tenant: str
    usage: TenantUsage
    server: str = ""
    """The attached server that says so."""


class LedgerStore(StorePart):
    async def write(self, hour: int, writer: str, sums: Mapping[str, TenantUsage]) -> bool:
        """Writes `writer`'s sums for that hour, by tenant. False, perhaps after a part, if Redis is unreachable."""
        names = list(sums)
        for start in range(0, len(names), _MAX_TENANTS):
            part = {
                f"{name}/{each}": _written(sums[name], each)
                for name in names[start : start + _MAX_TENANTS]
                for each in _FIELDS
            }
            if not await self._write(hour, writer, part):
                return False
        return True

    async def _write(self, hour: int, writer: str, part: dict[str, int | str]) -> bool:
        async def work(redis: Redis) -> bool:
            pipe = redis.pipeline(transaction=True)
            key = self._keys.ledger(hour, writer)
            pipe.hset(key, mapping=part)  # type: ignore[arg-type]  # Its stubs say str.
            pipe.expire(key, KEPT_HOURS * HOUR_S)
            pipe.zadd(self._keys.ledgers, {f"{hour}:{writer}": hour})
            pipe.zremrangebyscore(self._keys.ledgers, 0, hour - KEPT_HOURS)
            await pipe.execute()
            return True

        return await self._link.call_in_background(work) is not None

    async def read(self, first_hour: int, last_hour: int, tenant: str = "") -> list[LedgerEntry]:
        """Entries of all routers, and of one tenant or all, without damaged fields. Raises Unavailable."""

        async def names_of(redis: Redis) -> Any:
            return await redis.zrangebyscore(self._keys.ledgers, first_hour, last_hour)

        def read(names: Any) -> list[tuple[int, str]]:
            return [(int(hour), writer) for hour, _, writer in (name.decode().partition(":") for name in names)]

        ledgers = await self._link.require(reading(names_of, read))
        found: list[LedgerEntry] = []
        for start in range(0, len(ledgers), _MAX_LEDGERS):
            found += await self._entries(ledgers[start : start + _MAX_LEDGERS], tenant)
        return found

    async def _entries(self, ledgers: Sequence[tuple[int, str]], tenant: str) -> list[LedgerEntry]:
        wanted = [f"{tenant}/{each}" for each in _FIELDS]

        async def work(redis: Redis) -> Any:
            pipe = redis.pipeline(transaction=False)
            for hour, writer in ledgers:
                key = self._keys.ledger(hour, writer)
                if tenant and not writer.startswith(ATTACHED):
                    pipe.hmget(key, wanted)
                else:
                    pipe.hgetall(key)
            return await pipe.execute()

        def read(answers: Any) -> list[LedgerEntry]:
            found, damaged = [], list[str]()
            for (hour, writer), answer in zip(ledgers, answers, strict=True):
                if isinstance(answer, list):
                    answer = {k.encode(): v for k, v in zip(wanted, answer, strict=True) if v is not None}
                sums, wrong = _by_tenant(answer.items())
                damaged += [f"{self._keys.ledger(hour, writer)} {field!r}" for field in wrong]
                for name, usage in sums.items():
                    whose, server = _named(name) if writer.startswith(ATTACHED) else (name, "")
                    if tenant in ("", whose):
                        found.append(LedgerEntry(hour, whose, usage, server))
            if damaged:
                more = f" and {len(damaged) - _MAX_NAMED} more" if len(damaged) > _MAX_NAMED else ""
                self._link.leave_out(f"of bills: {', '.join(damaged[:_MAX_NAMED])}{more}")
            return found

        return await self._link.require(reading(work, read))


def _named(name: str) -> tuple[str, str]:
    """Tenant and server. Beyond the number that is counted separately neither is known."""
    tenant, _, server = name.partition(" ")
    return tenant, server or tenant


def _by_tenant(values: Iterable[tuple[bytes, bytes]]) -> tuple[dict[str, TenantUsage], list[bytes]]:
    """Sums by tenant, and the damaged fields, which no sum has."""
    sums: dict[str, TenantUsage] = {}
    damaged = list[bytes]()
    for key, value in values:
        try:
            tenant, _, name = key.decode().rpartition("/")
            # A later version may have fields that this one does not know.
            if name in _FIELDS:
                setattr(sums.setdefault(tenant, TenantUsage()), name, _read(name, value))
        except (ValueError, RecursionError):
            damaged.append(key)
    return sums, damaged


def _written(usage: TenantUsage, name: str) -> int | str:
    value: int | dict[str, SourceSums] = getattr(usage, name)
    return json.dumps(value) if isinstance(value, dict) else value


def _read(name: str, value: bytes) -> int | dict[str, SourceSums]:
    """Raises ValueError, RecursionError."""
    if name in _NUMBERS:
        return _sum(int(value), -_MAX_SUM)
    sources = json.loads(value)
    if not isinstance(sources, dict) or not all(isinstance(sums, list) for sums in sources.values()):
        raise ValueError("not sums by source")
    known = len(SourceSums._fields)
    return {source: SourceSums(*(_sum(each) for each in sums[:known])) for source, sums in sources.items()}


def _sum(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or not least <= value <= _MAX_SUM:
        raise ValueError("not a sum")
    return value
