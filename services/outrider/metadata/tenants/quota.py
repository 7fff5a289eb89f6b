"""The tenants' quotas in Redis: one bucket per tenant, refilled by the server's clock.

A gateway takes a slice, some 150 ms worth of the rate, in one call. So the gateways together grant what the bucket had,
however requests are spread over them. A gateway that dies loses at most a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.metadata.connection.part import StorePart

if TYPE_CHECKING:
    from redis.asyncio import Redis

RUNNING_TTL_S = 5
_TTL_MS = 600_000

_TAKE = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local place = 1
if tonumber(ARGV[8]) > 0 then
  local running = 0
  local others = redis.call('HGETALL', KEYS[2])
  for i = 1, #others, 2 do
    local count, until_s = string.match(others[i + 1], '(%d+) ([%d.]+)')
    if tonumber(until_s) < now then
      redis.call('HDEL', KEYS[2], others[i])
    elseif others[i] ~= ARGV[7] then
      running = running + tonumber(count)
    end
  end
  if running + tonumber(ARGV[9]) > tonumber(ARGV[8]) then
    -- Nothing is given without a place. What comes back is kept.
    place = 0
  else
    redis.call('HSET', KEYS[2], ARGV[7], ARGV[9] .. ' ' .. string.format('%.3f', now + tonumber(ARGV[10])))
    redis.call('PEXPIRE', KEYS[2], ARGV[11])
  end
end
local known = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local elapsed = known[3] and math.max(0, now - tonumber(known[3])) or 0
local level = {}
for i = 1, 2 do
  local rate, capacity = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1])
  local back = i == 2 and tonumber(ARGV[13]) or 0
  level[i] = math.min(capacity, (known[i] and tonumber(known[i]) or capacity) + rate * elapsed + back)
end
-- A request that gets no tokens is refused, and must leave no debt of requests.
local served = tonumber(ARGV[12]) == 0 or level[2] > 0
local given, left = {}, {}
for i = 1, 2 do
  given[i] = math.max(0, math.min(level[i], place * tonumber(ARGV[3 * i])))
  -- The whole price, which may leave a debt here: it is paid off whether anybody asks or not.
  if i == 1 then
    given[i] = math.floor(given[i])
    if served and level[i] >= 1 then given[i] = math.max(given[i], place * tonumber(ARGV[14])) end
  elseif level[i] > 0 then
    given[i] = math.max(given[i], place * tonumber(ARGV[12]))
  end
  left[i] = level[i] - given[i]
end
redis.call('HSET', KEYS[1], 'requests', string.format('%.6f', left[1]), 'tokens', string.format('%.6f', left[2]),
  'at', string.format('%.6f', now))
-- Not before it is full again: a debt must not be forgotten.
local ttl_ms = tonumber(ARGV[11])
for i = 1, 2 do
  local rate, capacity = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1])
  if rate > 0 then ttl_ms = math.max(ttl_ms, 1000 * (capacity - left[i]) / rate) end
end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.min(ttl_ms, 1e12)))
return {tostring(place), string.format('%.6f', given[1]), string.format('%.6f', given[2]),
  string.format('%.6f', left[1]), string.format('%.6f', left[2])}
"""


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    """For one quantity: the rate per second, the size of the bucket, and the wanted amount."""

    rate: float
    capacity: float
    amount: float


@dataclass(frozen=True, slots=True)
class Granted:
    place: bool
    """False: as many requests run as allowed, on all gateways together."""
    requests: float
    """An integer."""
    tokens: float
    requests_left: float
    """What the bucket still has: below 1 if no request was granted, and a debt if more were taken than it had."""
    tokens_left: float
    """The same for tokens: 0 or a debt if none were granted."""


class QuotaStore(StorePart):
    """Never raises because Redis is unreachable."""

    async def take(
        self,
        tenant: str,
        requests: QuotaRequest,
        tokens: QuotaRequest,
        *,
        price: float,
        num_requests: int = 0,
        given_back: float = 0.0,
        gateway: str,
        running: int,
        most_running: int,
    ) -> Granted | None:
        """Takes as much of the wanted amounts as there is; at least `price` tokens if there are any, and at least
        `num_requests` requests if there is one. `given_back`: unused tokens from earlier calls.

        `running`: at this gateway, with the new one; `most_running` 0: no limit. None while Redis is unreachable.
        """
        keys = (self._keys.quota(tenant), self._keys.running(tenant))
        amounts = [requests.rate, requests.capacity, requests.amount, tokens.rate, tokens.capacity, tokens.amount]
        arguments: tuple[Any, ...] = (
            *amounts,
            gateway,
            most_running,
            running,
            RUNNING_TTL_S,
            _TTL_MS,
            price,
            given_back,
            num_requests,
        )
        answer = await self._link.call(lambda redis: redis.eval(_TAKE, len(keys), *keys, *arguments))
        return None if answer is None else Granted(answer[0] == b"1", *map(float, answer[1:]))

    async def report_running(self, gateway: str, running: dict[str, int]) -> None:
        """Reports the number of each tenant's requests that run at this gateway. Valid for 5 s."""

        async def work(redis: Redis) -> Any:
            time_s, time_us = await redis.time()
            until_s = time_s + time_us / 1e6 + RUNNING_TTL_S
            pipe = redis.pipeline(transaction=False)
            for tenant, count in running.items():
                pipe.hset(self._keys.running(tenant), gateway, f"{count} {until_s:.3f}")
                pipe.pexpire(self._keys.running(tenant), _TTL_MS)
            return await pipe.execute()

        if running:
            await self._link.call_in_background(work)
