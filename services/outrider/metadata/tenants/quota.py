"""The tenants' quotas in Redis: one bucket per tenant, refilled by the server's clock.

A gateway takes a slice, some 150 ms worth of the rate, in one call. So the gateways together grant what the bucket had,
however requests are spread over them. A gateway that dies loses at most a slice.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outrider.metadata.connection.part import StorePart
from outrider.metadata.connection.reading import reading

if TYPE_CHECKING:
    from redis.asyncio import Redis

RUNNING_TTL_S = 5
_TTL_MS = 600_000

_TAKE = """
local asked = cjson.decode(ARGV[1])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local place = 1
if asked.most_running > 0 then
  local running = 0
  local others = redis.call('HGETALL', KEYS[2])
  for i = 1, #others, 2 do
    local count, until_s = string.match(others[i + 1], '(%d+) ([%d.]+)')
    if tonumber(until_s) < now then
      redis.call('HDEL', KEYS[2], others[i])
    elseif others[i] ~= asked.gateway then
      running = running + tonumber(count)
    end
  end
  if running + asked.running > asked.most_running then
    -- Nothing is given without a place. What comes back is kept.
    place = 0
  else
    local until_s = now + asked.running_ttl_s
    redis.call('HSET', KEYS[2], asked.gateway, string.format('%d %.3f', asked.running, until_s))
    redis.call('PEXPIRE', KEYS[2], asked.ttl_ms)
  end
end
local known = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local elapsed = known[3] and math.max(0, now - tonumber(known[3])) or 0
local function level(bucket, left)
  return math.min(bucket.capacity, (left and tonumber(left) or bucket.capacity) + bucket.rate * elapsed + bucket.back)
end
local requests, tokens = level(asked.requests, known[1]), level(asked.tokens, known[2])
local function slice(bucket, left)
  return math.max(0, math.min(left, place * bucket.amount))
end
local given_requests, given_tokens = math.floor(slice(asked.requests, requests)), slice(asked.tokens, tokens)
-- The whole price, which may leave a debt here: it is paid off whether anybody asks or not.
if tokens > 0 then given_tokens = math.max(given_tokens, place * asked.price) end
-- A request that gets no tokens is refused, and must leave no debt of requests.
local served = asked.price == 0 or tokens > 0
if served and requests >= 1 then given_requests = math.max(given_requests, place * asked.num_requests) end
requests, tokens = requests - given_requests, tokens - given_tokens
redis.call('HSET', KEYS[1], 'requests', string.format('%.6f', requests), 'tokens', string.format('%.6f', tokens),
  'at', string.format('%.6f', now))
-- Not before it is full again: a debt must not be forgotten.
local function full_ms(bucket, left)
  return bucket.rate > 0 and 1000 * (bucket.capacity - left) / bucket.rate or 0
end
local ttl_ms = math.max(asked.ttl_ms, full_ms(asked.requests, requests), full_ms(asked.tokens, tokens))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.min(ttl_ms, 1e12)))
return {tostring(place), string.format('%.6f', given_requests), string.format('%.6f', given_tokens),
  string.format('%.6f', requests), string.format('%.6f', tokens)}
"""


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    """For one quantity: the rate per second, the size of the bucket, the wanted amount, and what is given back of
    earlier ones."""

    rate: float
    capacity: float
    amount: float
    back: float = 0.0


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
        gateway: str,
        running: int,
        most_running: int,
    ) -> Granted | None:
        """Takes as much of the wanted amounts as there is; at least `price` tokens if there are any, and at least
        `num_requests` requests if there is one.

        `running`: at this gateway, with the new one; `most_running` 0: no limit. None while Redis is unreachable.
        """
        keys = (self._keys.quota(tenant), self._keys.running(tenant))
        asked = {
            "requests": asdict(requests),
            "tokens": asdict(tokens),
            "price": price,
            "num_requests": num_requests,
            "gateway": gateway,
            "running": running,
            "most_running": most_running,
            "running_ttl_s": RUNNING_TTL_S,
            "ttl_ms": _TTL_MS,
        }
        return await self._link.call(
            reading(
                lambda redis: redis.eval(_TAKE, len(keys), *keys, json.dumps(asked)),
                lambda answer: Granted(answer[0] == b"1", *(_finite(one) for one in answer[1:])),
            )
        )

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


def _finite(said: bytes) -> float:
    """Raises ValueError."""
    if not math.isfinite(number := float(said)):
        raise ValueError(f"{number} is no amount")
    return number
