"""Cordons of workers in Redis. Readers of the leases get the cordon with the lease.

Every change also writes the audit stream in the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.metadata.connection.part import StorePart
from outrider.metadata.tenants.tenants import MAX_AUDIT_ENTRIES
from outrider.rpc.v1 import control_pb2

if TYPE_CHECKING:
    from redis.asyncio import Redis

CORDON_KEPT_S = 86_400
"""How long a cordon is kept after the last read of the worker's lease: a worker that returns is still cordoned."""


class CordonStore(StorePart):
    """Raises Unavailable while Redis is unreachable."""

    async def put(self, cordon: control_pb2.Cordon, action: str) -> None:
        """Sets or replaces a worker's cordon. `action`: the audit entry's action."""

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

        async def work(redis: Redis) -> int:
            pipe = redis.pipeline(transaction=True)
            pipe.delete(self._keys.cordon(worker_id))
            entry: dict[Any, Any] = {"action": "uncordon worker", "name": worker_id, "by": by}
            pipe.xadd(self._keys.audit, entry, maxlen=MAX_AUDIT_ENTRIES, approximate=True)
            return int((await pipe.execute())[0])

        return bool(await self._link.require(work))

    async def mark_drained(self, cordon: control_pb2.Cordon, drained_unix_ms: int) -> None:
        """Has no effect if the cordon was changed or removed meanwhile."""
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
