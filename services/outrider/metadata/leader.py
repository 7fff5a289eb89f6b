"""Leader election: one process at a time holds a lease in Redis. Each leader has a higher epoch than those before.

A leader's writes carry its epoch, and are refused after a later leader has written. So a leader that was suspended does
not undo the writes of its successor.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from outrider.metadata.connection.part import StorePart
from outrider.metadata.connection.reading import reading
from outrider.metadata.keys import Keys

if TYPE_CHECKING:
    from outrider.metadata.connection.link import RedisLink

# Short, because a killed leader delays its successor by this time. To lose the lease by a slow moment does no harm.
LEADER_TTL_S = 3.0
# After this long without a renewed lease another one may have led for a while; without a leader, none comes any more.
LEADER_GONE_S = 2 * LEADER_TTL_S

# An epoch that any process has seen is never reused, even if Redis has lost its data. In that case the former leader
# gets the lease first, because any other one knows only the plan in Redis. Negative: the epoch of another leader.
_LEAD = """
local holder = redis.call('GET', KEYS[1])
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0')
local seen = tonumber(ARGV[3])
if holder and holder ~= ARGV[1] then return -epoch end
if epoch < seen and ARGV[4] == '0' then
  redis.call('SET', KEYS[2], seen)
  -- Perhaps a lease of ours that had ended is back with the older data: not in the epoch of another.
  redis.call('DEL', KEYS[1])
  return -seen
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if not holder or epoch < seen then
  epoch = math.max(epoch, seen) + 1
  redis.call('SET', KEYS[2], epoch)
end
return epoch
"""
# Far above any number of leaders, and exact in Lua's numbers. A peer's higher value is no epoch.
_MAX_EPOCH = 2**48
_RESIGN = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class LeaderLease(StorePart):
    """One process's candidacy. Call `hold` more often than every LEADER_TTL_S."""

    def __init__(self, link: RedisLink, keys: Keys, holder: str) -> None:
        super().__init__(link, keys)
        self._holder = holder
        self._seen_epoch = 0
        self._leads = False
        self._clock = time.monotonic
        self._renewed_s = -math.inf

    @property
    def unrenewed_s(self) -> float:
        """Seconds since this process last renewed the lease."""
        return self._clock() - self._renewed_s

    async def hold(self) -> int | None:
        """The epoch in which this process leads; 0 if another one leads; None while Redis is unreachable."""
        keys, asked_s = (self._keys.leader, self._keys.leader_epoch), self._clock()
        arguments = self._holder, round(LEADER_TTL_S * 1000), self._seen_epoch, int(self._leads)
        epoch = await self._link.call_in_background(
            reading(lambda redis: redis.eval(_LEAD, len(keys), *keys, *arguments), int)
        )
        if epoch is None or abs(epoch) > _MAX_EPOCH:
            return None
        self._leads = epoch > 0
        self._renewed_s = asked_s if self._leads else -math.inf
        self._seen_epoch = max(self._seen_epoch, abs(epoch))
        return epoch if self._leads else 0

    def saw(self, epoch: int) -> None:
        """To be called when a follower knows this epoch: the next `hold` takes a higher one."""
        if epoch <= _MAX_EPOCH:
            self._seen_epoch = max(self._seen_epoch, epoch)

    async def resign(self) -> None:
        """Gives up the lease, so that another process can lead at once."""
        await self._link.call_in_background(lambda redis: redis.eval(_RESIGN, 1, self._keys.leader, self._holder))
