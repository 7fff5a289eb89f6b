"""Workers that operators have taken out of use, in Redis: readers of the leases find the cordon beside the lease.

Every change also writes the audit stream, in the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.metadata.keys import Keys
from outrider.metadata.tenants import MAX_AUDIT_ENTRIES
from outrider.rpc.v1 import control_pb2

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from outrider.metadata.link import RedisLink

CORDON_KEPT_S = 86_400
"""After the last read of the worker's lease: one that is away for a while comes back cordoned."""


class CordonStore:
    """Owned by one event loop. Raises Unavailable while Redis is away."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    async def put(self, cordon: control_pb2.Cordon, action: str) -> None:
        """In the place of the one there is, if any. `action`: what the audit says was done."""

        async def work(redis: Redis) -> bool:
            pipe = redis.pipeline(transaction=True)
            pipe.set(self._keys.cordon(cordon.worker_id), cordon.SerializeToString(), ex=CORDON_KEPT_S)
            entry: dict[Any, Any] = {
                "action": action,
                "name": cordon.worker_id,
                "reason": cordon.reason,
                "by": cordon.by,
            }
            pipe.xadd(self._keys.audit, entry, maxlen=MAX_AUDIT_ENTRIES, approximate=True)
            await pipe.execute()
            return True

        await self._link.require(work)

    async def remove(self, worker_id: str, by: str) -> bool:
        """Whether there was one."""

        async def work(redis: Redis) -> int:
            pipe = redis.pipeline(transaction=True)
            pipe.delete(self._keys.cordon(worker_id))
            entry: dict[Any, Any] = {"action": "uncordon worker", "name": worker_id, "by": by}
            pipe.xadd(self._keys.audit, entry, maxlen=MAX_AUDIT_ENTRIES, approximate=True)
            return int((await pipe.execute())[0])

        return bool(await self._link.require(work))

    async def mark_drained(self, cordon: control_pb2.Cordon, drained_unix_ms: int) -> None:
        """Unless it was changed or taken back meanwhile."""
        before = cordon.SerializeToString()
        drained = control_pb2.Cordon()
        drained.CopyFrom(cordon)
        drained.drained_unix_ms = drained_unix_ms

        async def work(redis: Redis) -> object:
            arguments = (before, drained.SerializeToString(), CORDON_KEPT_S)
            return await redis.eval(_REPLACE, 1, self._keys.cordon(cordon.worker_id), *arguments)

        await self._link.require(work)


_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""
