"""What was ordered to be erased, and who has done so. An order stands, so that whoever was away obeys when it returns.

Times are of the store's clock, and each order is later than the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.metadata.connection.part import StorePart
from outrider.metadata.connection.reading import reading
from outrider.metadata.tenants.tenants import AUDIT, HISTORY, ORDER, SAMPLES

if TYPE_CHECKING:
    from redis.asyncio import Redis

_ORDER = (
    AUDIT
    + ORDER
    + """
local at = order(KEYS[1], ARGV[1], ARGV[2])
audit(KEYS[2], 'action', 'delete ' .. ARGV[1], 'name', ARGV[2], 'by', ARGV[3])
return at
"""
)
# Whoever has obeyed an order knows it, also if the store has lost it meanwhile.
_KNOWN = """
for i = 1, #ARGV, 2 do
  local known = redis.call('HGET', KEYS[1], ARGV[i])
  if not known or tonumber(known) < tonumber(ARGV[i + 1]) then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Order:
    tenant: str
    samples: bool
    """Of samples; else of history."""
    at_us: int

    @property
    def field(self) -> str:
        return f"{_kind(samples=self.samples)}/{self.tenant}"


class ErasureStore(StorePart):
    """All methods raise Unavailable while Redis is unreachable."""

    async def order(self, tenant: str, *, samples: bool, by: str) -> Order:
        """With an entry in the audit trail. It takes the place of the tenant's order of this kind before it."""
        keys, kind = (self._keys.erasures, self._keys.audit), _kind(samples=samples)
        at_us = await self._link.require(
            reading(lambda redis: redis.eval(_ORDER, len(keys), *keys, kind, tenant, by), int)
        )
        return Order(tenant, samples, at_us)

    async def orders(self) -> list[Order]:
        split = await self._link.require(reading(lambda redis: redis.hgetall(self._keys.erasures), _split))
        found = (Order(tenant, kind == SAMPLES, at_us) for (kind, tenant), at_us in split.items())
        return sorted(found, key=_by_tenant)

    async def known(self, orders: Iterable[Order]) -> None:
        """Adds those that the store does not know, or knows earlier ones of."""
        arguments: list[Any] = [part for order in orders for part in (order.field, order.at_us)]
        if arguments:
            await self._link.require(lambda redis: redis.eval(_KNOWN, 1, self._keys.erasures, *arguments))

    async def add_volume(self, volume_id: str, where: str) -> None:
        """A volume has samples until it says otherwise, also while no target has it. `where`: for operators."""
        await self._link.require(lambda redis: redis.hset(self._keys.sample_volumes, volume_id, where))

    async def volumes(self) -> dict[str, str]:
        """Where each was last."""
        return await self._link.require(reading(lambda redis: redis.hgetall(self._keys.sample_volumes), _decoded))

    async def obeyed(self, holder: str, order: Order) -> None:
        """`holder`: a worker or a volume."""
        field = f"{holder}/{order.field}"
        await self._link.require(lambda redis: redis.hset(self._keys.erased, field, order.at_us))

    async def who_obeyed(self) -> Mapping[tuple[str, str], int]:
        """Holder and field of an order → the time of the last one that it has obeyed."""
        return await self._link.require(reading(lambda redis: redis.hgetall(self._keys.erased), _split))

    async def forget(self, holders: Iterable[str]) -> None:
        """Volumes or workers that are no more: nobody waits for them."""
        gone = set(holders)
        fields = [f"{holder}/{field}" for holder, field in await self.who_obeyed() if holder in gone]

        async def work(redis: Redis) -> int:
            deleted: Any = await redis.hdel(self._keys.erased, *fields) if fields else 0
            deleted += await redis.hdel(self._keys.sample_volumes, *gone) if gone else 0
            return int(deleted)

        await self._link.require(work)


def _kind(*, samples: bool) -> str:
    return SAMPLES if samples else HISTORY


def _decoded(found: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in found.items()}


def _split(found: Mapping[bytes, bytes]) -> dict[tuple[str, str], int]:
    """By what is before and after the first stroke of a field's name."""
    parts = {name.partition("/"): int(value) for name, value in _decoded(found).items()}
    return {(first, rest): value for (first, _, rest), value in parts.items()}


def _by_tenant(order: Order) -> tuple[str, bool]:
    return order.tenant, order.samples
