"""The leader's last plan, and operators' overrides for tenants. Survives every process except Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from outrider.metadata.connection.part import StorePart
from outrider.metadata.connection.reading import reading
from outrider.metadata.leader import LeaderLease
from outrider.metadata.tenants.tenants import DEFAULT_TENANT, MAX_AUDIT_ENTRIES, unknown_tenant
from outrider.rpc.v1 import policy_pb2, tenants_pb2

if TYPE_CHECKING:
    from redis.asyncio import Redis

_EPOCH = b"epoch"
# Most decisions in one command.
_AT_ONCE = 1000

_SAVE = """
if tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'epoch', unpack(ARGV))
return 1
"""
# If any tenants are defined, an undefined one is taken for a misspelling and refused. What is set can be removed.
_OVERRIDE = f"""
local removes = ARGV[2] == '' and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1
if not removes and ARGV[1] ~= '{DEFAULT_TENANT}'
  and redis.call('ZCARD', KEYS[3]) > 0 and redis.call('EXISTS', KEYS[4]) == 0 then
  return 0
end
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', {MAX_AUDIT_ENTRIES}, '*',
  'action', 'set speculation', 'name', ARGV[1], 'to', ARGV[3], 'by', ARGV[4],
  'max_draft_tokens', ARGV[5], 'until_unix_ms', ARGV[6])
return 1
"""


class PlanStore(StorePart):
    _seen: bytes | str | None = None
    """The newest entry of the audit that `changed` has seen."""

    def lease(self, holder: str) -> LeaderLease:
        return LeaderLease(self._link, self._keys, holder)

    async def save(self, epoch: int, decisions: Iterable[policy_pb2.TenantDecision]) -> bool:
        """Replaces the decisions for these tenants and targets. False if a later leader has written, or while Redis is
        unreachable."""
        fields = [(f"{d.tenant}/{d.target}", d.SerializeToString()) for d in decisions]

        async def work(redis: Redis) -> bool:
            for first in range(0, max(1, len(fields)), _AT_ONCE):
                part = [value for pair in fields[first : first + _AT_ONCE] for value in pair]
                if not await redis.eval(_SAVE, 1, self._keys.plan, epoch, *part):
                    return False
            return True

        return bool(await self._link.call_in_background(work))

    async def load(self) -> list[policy_pb2.TenantDecision] | None:
        """The decisions for all tenants; None while Redis is unreachable."""

        def read(found: Any) -> list[policy_pb2.TenantDecision]:
            return [_parsed(policy_pb2.TenantDecision, value) for field, value in found.items() if field != _EPOCH]

        return await self._link.call_in_background(reading(lambda redis: redis.hgetall(self._keys.plan), read))

    async def find(self, tenant: str, targets: Iterable[str]) -> list[policy_pb2.TenantDecision] | None:
        """The existing decisions for one tenant at these targets; None while Redis is unreachable."""
        fields = [f"{tenant}/{target}" for target in targets]
        if not fields:
            return []

        def read(found: Any) -> list[policy_pb2.TenantDecision]:
            return [_parsed(policy_pb2.TenantDecision, value) for value in found if value is not None]

        return await self._link.call_in_background(reading(lambda redis: redis.hmget(self._keys.plan, fields), read))

    async def set_override(self, tenant: str, override: tenants_pb2.SpeculationOverride | None) -> None:
        """None removes it. Raises Unavailable; NotFound if tenants are defined but not this one."""
        value = b"" if override is None else override.SerializeToString()
        name = "auto" if override is None else tenants_pb2.SpeculationSetting.Name(override.setting).lower()
        override = override or tenants_pb2.SpeculationOverride()
        cap = override.max_draft_tokens if override.HasField("max_draft_tokens") else ""
        fields = (name.removeprefix("speculation_setting_"), override.by, cap, override.until_unix_ms or "")

        keys = (self._keys.overrides, self._keys.audit, self._keys.tenants, self._keys.tenant(tenant))
        if not await self._link.require(lambda redis: redis.eval(_OVERRIDE, len(keys), *keys, tenant, value, *fields)):
            raise unknown_tenant(tenant, "tenant")

    async def changed(self, timeout_s: float) -> bool | None:
        """Whether operators have changed anything since the last call, or do within this time; then at once. The first
        call cannot know, and says yes. None while Redis is unreachable."""

        async def work(redis: Redis) -> bool:
            after: dict[Any, Any] = {self._keys.audit: self._seen}
            block_ms = max(1, round(timeout_s * 1000))
            if self._seen is not None and not await redis.xread(after, count=1, block=block_ms):
                return False
            last = await redis.xrevrange(self._keys.audit, count=1)
            self._seen = last[0][0] if last else b"0-0"
            return True

        return await self._link.call_in_background(work, waits_s=timeout_s)

    async def overrides(self, epoch: int = 0) -> dict[str, tenants_pb2.SpeculationOverride] | None:
        """The current overrides by tenant; None while Redis is unreachable.

        `epoch`: that of the leader that reads them. If Redis has another epoch, it has lost its data, perhaps with
        overrides, and the result is None too.
        """

        async def work(redis: Redis) -> Any:
            pipe = redis.pipeline(transaction=True)
            pipe.hgetall(self._keys.overrides)
            pipe.get(self._keys.leader_epoch)
            return await pipe.execute()

        def read(answer: Any) -> dict[str, tenants_pb2.SpeculationOverride] | None:
            found, current = answer
            if epoch and int(current or 0) != epoch:
                return None
            now_ms = time.time() * 1000
            known = {name.decode(): _parsed(tenants_pb2.SpeculationOverride, value) for name, value in found.items()}
            return {name: one for name, one in known.items() if not one.until_unix_ms or one.until_unix_ms > now_ms}

        return await self._link.call_in_background(reading(work, read))


def _parsed(kind: Any, value: bytes) -> Any:
    """A value that cannot be parsed counts as an empty message."""
    try:
        return kind.FromString(value)
    except DecodeError:
        return kind()
