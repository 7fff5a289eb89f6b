"""Tenants and API keys in Redis. Every change is one atomic script, which also writes the audit stream.

This module only stores records: gateways check keys, and the control plane checks operators' input. A key itself is
never stored, only its SHA-256, by which it is found.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.errors import Conflict, NotFound
from outrider.metadata.connection.part import StorePart
from outrider.metadata.connection.reading import reading
from outrider.metadata.tenants.key_memory import KeyMemory
from outrider.rpc.v1 import control_pb2, tenants_pb2

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from outrider.metadata.connection.link import RedisLink
    from outrider.metadata.keys import Keys

log = logging.getLogger(__name__)

MAX_AUDIT_ENTRIES = 100_000
MAX_KEYS_PER_TENANT = 16
DEFAULT_TENANT = "default"
"""The tenant of requests without a key, if none are required. It needs no record."""
_KEPT_AFTER_EXPIRY_S = 86_400
SAMPLES, HISTORY = "samples", "history"
DERIVED = {
    "samples": SAMPLES,
    "corpora that `outrider distill --from-samples` makes of them": SAMPLES,
    "checkpoints of that training": SAMPLES,
    "drafts that it makes": SAMPLES,
    "suffix history": HISTORY,
    "traces": HISTORY,
    "keys and values of prefixes": HISTORY,
    "compiled grammars": HISTORY,
}
"""All that is kept of a tenant's texts after their request, and the kind of order that erases it."""
_FIELDS = ["record", "version", "id"]


_FIND = """
local required = redis.call('EXISTS', KEYS[3])
local known = redis.call('EXISTS', KEYS[4])
local key = redis.call('HMGET', KEYS[1], 'tenant', 'record')
local tenant = key[1] or ARGV[1]
local record = redis.call('HMGET', KEYS[2] .. tenant, 'record', 'version', 'id')
local now = redis.call('TIME')
return {required, known, key[2] or '', record[1] or '', record[2] or '0', record[3] or '', now[1] * 1000000 + now[2]}
"""
_KEEP_REQUIRED = """
local required = redis.call('EXISTS', KEYS[1])
if required == 0 and ARGV[1] == '1' then
  redis.call('SET', KEYS[1], 1)
  required = 2
end
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('HSET', KEYS[2], 'known', 1) end
return required
"""
AUDIT = f"""
local function audit(stream, ...)
  redis.call('XADD', stream, 'MAXLEN', '~', {MAX_AUDIT_ENTRIES}, '*', ...)
end
"""
# An order is later than all before it, and takes the place of the tenant's order of this kind.
ORDER = """
local function order(orders, kind, tenant)
  local now = redis.call('TIME')
  local at = now[1] * 1000000 + now[2]
  local others = redis.call('HGETALL', orders)
  for i = 2, #others, 2 do at = math.max(at, tonumber(others[i]) + 1) end
  at = string.format('%.0f', at)
  redis.call('HSET', orders, kind .. '/' .. tenant, at)
  return at
end
"""
# Checks all versions first, so that a refused change has no effect.
_PUT = (
    AUDIT
    + """
for i = 1, #ARGV - 2, 4 do
  local expected = ARGV[i + 1]
  if expected ~= '0' and expected ~= (redis.call('HGET', KEYS[2] .. ARGV[i], 'version') or '0') then
    return ARGV[i]
  end
end
local changes = {}
for i = 1, #ARGV - 2, 4 do
  local name, record, key = ARGV[i], ARGV[i + 2], KEYS[2] .. ARGV[i]
  local known = redis.call('HMGET', key, 'record', 'version', 'id')
  local change = known[1] == record and 3 or known[1] and 2 or 1
  local version = known[2] or '0'
  if change ~= 3 then
    version = tostring(tonumber(version) + 1)
    if ARGV[#ARGV - 1] == '' then
      redis.call('HSET', key, 'record', record, 'version', version, 'id', known[3] or ARGV[i + 3])
      redis.call('ZADD', KEYS[1], 0, name)
      audit(KEYS[3], 'action', 'put tenant', 'name', name, 'version', version, 'by', ARGV[#ARGV],
        'old', known[1] or '', 'new', record)
    end
  end
  changes[#changes + 1] = {change, version}
end
return changes
"""
)
_DELETE = (
    AUDIT
    + ORDER
    + """
local record = redis.call('HGET', KEYS[2] .. ARGV[1], 'record')
if redis.call('DEL', KEYS[2] .. ARGV[1]) == 0 then return -1 end
redis.call('ZREM', KEYS[1], ARGV[1])
local members = redis.call('ZRANGEBYLEX', KEYS[4], '[' .. ARGV[1] .. '/', '(' .. ARGV[1] .. '0')
for _, member in ipairs(members) do
  local id = string.sub(member, #ARGV[1] + 2)
  local digest = redis.call('HGET', KEYS[5], id)
  if digest then redis.call('DEL', KEYS[6] .. digest) end
  redis.call('HDEL', KEYS[5], id)
  redis.call('ZREM', KEYS[4], member)
end
redis.call('HDEL', KEYS[7], ARGV[1])
local plan = redis.call('HGETALL', KEYS[8])
for i = 1, #plan, 2 do
  if string.sub(plan[i], 1, #ARGV[1] + 1) == ARGV[1] .. '/' then redis.call('HDEL', KEYS[8], plan[i]) end
end
redis.call('SADD', KEYS[9], ARGV[1])
for i = 3, #ARGV do order(KEYS[10], ARGV[i], ARGV[1]) end
audit(KEYS[3], 'action', 'delete tenant', 'name', ARGV[1], 'revoked_keys', #members, 'by', ARGV[2],
  'old', record or '')
return #members
"""
)
_ADD_KEY = (
    AUDIT
    + """
local tenant, id, digest, record, expire_s, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
if tenant ~= ARGV[7] and redis.call('EXISTS', KEYS[2] .. tenant) == 0 then return -1 end
local members = redis.call('ZRANGEBYLEX', KEYS[4], '[' .. tenant .. '/', '(' .. tenant .. '0')
local count = 0
for _, member in ipairs(members) do
  local other = string.sub(member, #tenant + 2)
  if redis.call('EXISTS', KEYS[6] .. (redis.call('HGET', KEYS[5], other) or '')) == 1 then
    count = count + 1
  else
    redis.call('HDEL', KEYS[5], other)
    redis.call('ZREM', KEYS[4], member)
  end
end
if count >= most then return -2 end
redis.call('HSET', KEYS[6] .. digest, 'tenant', tenant, 'record', record)
if expire_s ~= '0' then redis.call('EXPIREAT', KEYS[6] .. digest, expire_s) end
redis.call('HSET', KEYS[5], id, digest)
redis.call('ZADD', KEYS[4], 0, tenant .. '/' .. id)
redis.call('SET', KEYS[1], 1)
audit(KEYS[3], 'action', 'create key', 'tenant', tenant, 'id', id, 'by', ARGV[8])
return 1
"""
)
_REVOKE = (
    AUDIT
    + """
local digest = redis.call('HGET', KEYS[3], ARGV[1])
if not digest then return '' end
local key = redis.call('HMGET', KEYS[4] .. digest, 'tenant', 'record')
redis.call('DEL', KEYS[4] .. digest)
redis.call('HDEL', KEYS[3], ARGV[1])
if not key[1] then return '' end
redis.call('ZREM', KEYS[2], key[1] .. '/' .. ARGV[1])
audit(KEYS[1], 'action', 'revoke key', 'tenant', key[1], 'id', ARGV[1], 'by', ARGV[2])
return key[2]
"""
)


@dataclass(frozen=True, slots=True)
class FoundKey:
    """The store's answer about one key, or about a request without a key."""

    keys_required: bool
    key: tenants_pb2.ApiKey | None
    """None if the key does not exist."""
    tenant: tenants_pb2.Tenant | None
    """The key's tenant, or without a key the default one. None if it has no record."""
    read_unix_us: int = 0
    """When, by the store's clock."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    id: str
    fields: Mapping[str, str] = field(default_factory=dict)
    old: tenants_pb2.Tenant | None = None
    """The tenant's record before the change, if there was one."""
    new: tenants_pb2.Tenant | None = None


class TenantStore(StorePart):
    """While Redis is unreachable, `find` returns None and the others raise Unavailable."""

    def __init__(self, link: RedisLink, keys: Keys, memory: KeyMemory) -> None:
        super().__init__(link, keys)
        self._memory = memory

    async def find(self, digest: bytes | None) -> FoundKey | None:
        """The key with this SHA-256; with None, the answer for a request without one.

        None: Redis is unreachable, or has no data: then no control plane has told yet whether keys are required.
        """
        names = self._keys
        keys = (names.api_key((digest or b"").hex()), names.tenant(""), names.keys_required, names.keys_required_known)
        default = DEFAULT_TENANT if digest is None else ""

        def read(answer: Any) -> tuple[bool, bool, tenants_pb2.ApiKey | None, tenants_pb2.Tenant | None, int]:
            required, known, key, record, version, tenant_id, read_us = answer
            # Not true or false of anything: what the store did not say lets nobody in.
            return (
                {0: False, 1: True}[required],
                {0: False, 1: True}[known],
                _parse_key(key) if key else None,
                _parse(record, version, tenant_id) if record else None,
                int(read_us),
            )

        answer = await self._link.call_in_background(
            reading(lambda redis: redis.eval(_FIND, len(keys), *keys, default), read)
        )
        if answer is None:
            return None
        required, known, key, tenant, read_us = answer
        if required:
            self._memory.remember()
        elif self._memory.required:
            await self.keep_required()
        elif not known:
            return None
        if tenant is not None:
            tenant.read_unix_us = read_us
        return FoundKey(self._memory.required, key, tenant, read_us)

    async def keep_required(self) -> None:
        """Tells gateways whether keys are required. To be called by control planes again and again: where this process
        knows that they are and the store has lost it, it is written again."""
        keys, known = (self._keys.keys_required, self._keys.keys_required_known), int(self._memory.required)
        required = await self._link.call_in_background(
            lambda redis: redis.eval(_KEEP_REQUIRED, len(keys), *keys, known)
        )
        if required:
            self._memory.remember()
        if required == 2:
            log.error(
                "the metadata store has lost its data: API keys stay required. Apply the tenants and make keys again,"
                " or restore the store"
            )

    async def get(self, name: str) -> tenants_pb2.Tenant:
        """Raises NotFound."""
        key = self._keys.tenant(name)
        [found] = await self._link.require(
            reading(lambda redis: redis.hmget(key, _FIELDS), lambda row: [_parse_row(*row)])
        )
        if found is None:
            raise unknown_tenant(name)
        return found

    async def page(self, after: str, limit: int) -> tuple[list[tenants_pb2.Tenant], str, int]:
        """Tenants by name, from the first after `after`; the start of the next page, empty at the end; and the number
        of all."""

        async def work(redis: Redis) -> Any:
            start = f"({after}" if after else "-"
            names: Any = await redis.zrangebylex(self._keys.tenants, start, "+", start=0, num=limit)
            pipe = redis.pipeline(transaction=False)
            for name in names:
                pipe.hmget(self._keys.tenant(name.decode()), _FIELDS)
            pipe.zcard(self._keys.tenants)
            return names, await pipe.execute()

        def read(answer: Any) -> tuple[list[tenants_pb2.Tenant], str, int]:
            names, (*rows, total) = answer
            # Of those that were deleted meanwhile only the names are there.
            found = [tenant for row in rows if (tenant := _parse_row(*row)) is not None]
            return found, names[-1].decode() if len(names) == limit else "", int(total)

        return await self._link.require(reading(work, read))

    async def put(
        self, tenants: Sequence[tenants_pb2.Tenant], *, by: str, dry_run: bool = False
    ) -> list[control_pb2.TenantChange]:
        """Writes all of them or none. Raises Conflict if one has another version than given."""
        keys = (self._keys.tenants, self._keys.tenant(""), self._keys.audit)
        arguments: list[Any] = []
        for tenant in tenants:
            # The id is that of a tenant that is created; another one keeps its own.
            arguments += [tenant.name, tenant.version, _serialize(tenant), f"tenant-{secrets.token_hex(6)}"]
        arguments += ["dry" if dry_run else "", by]

        def read(answer: Any) -> str | list[control_pb2.TenantChange]:
            if isinstance(answer, bytes):
                return _named(tenants, answer.decode())
            return [
                control_pb2.TenantChange(name=tenant.name, change=change, version=int(version))
                for tenant, (change, version) in zip(tenants, answer, strict=True)
            ]

        found = await self._link.require(reading(lambda redis: redis.eval(_PUT, len(keys), *keys, *arguments), read))
        if isinstance(found, str):
            raise Conflict("it was changed meanwhile: read it again", field=found)
        return found

    async def delete(self, name: str, *, by: str) -> int:
        """Also deletes its keys, speculation override and plan, and orders what is derived from its texts to be erased,
        so that a later tenant of this name begins with nothing. Returns the number of keys. Raises NotFound."""
        keys = (
            self._keys.tenants,
            self._keys.tenant(""),
            self._keys.audit,
            self._keys.api_keys,
            self._keys.api_key_digests,
            self._keys.api_key(""),
            self._keys.overrides,
            self._keys.plan,
            self._keys.deleted_tenants,
            self._keys.erasures,
        )
        kinds = sorted(set(DERIVED.values()))
        num_keys = await self._link.require(
            reading(lambda redis: redis.eval(_DELETE, len(keys), *keys, name, by, *kinds), int)
        )
        if num_keys < 0:
            raise unknown_tenant(name)
        return num_keys

    async def deleted(self) -> set[str]:
        """Deleted tenants that the planner may still know."""
        return await self._link.require(
            reading(
                lambda redis: redis.smembers(self._keys.deleted_tenants),
                lambda names: {name.decode() for name in names},
            )
        )

    async def forgotten(self, names: Iterable[str]) -> None:
        """To be called when the planner has dropped these deleted tenants."""
        await self._link.require(lambda redis: redis.srem(self._keys.deleted_tenants, *names))

    async def page_of_keys(self, tenant: str, after: str, limit: int) -> tuple[list[tenants_pb2.ApiKey], str]:
        """Keys by tenant and id, of one tenant or of all, and the start of the next page, empty at the end."""
        first = f"({after}" if after else f"[{tenant}/" if tenant else "-"
        # "0" is the character after "/".
        last = f"({tenant}0" if tenant else "+"

        async def work(redis: Redis) -> Any:
            members: Any = await redis.zrangebylex(self._keys.api_keys, first, last, start=0, num=limit)
            ids = [member.rpartition(b"/")[2] for member in members]
            digests: Any = await redis.hmget(self._keys.api_key_digests, ids) if ids else []
            pipe = redis.pipeline(transaction=False)
            for digest in digests:
                pipe.hget(self._keys.api_key((digest or b"").decode()), "record")
            return members, await pipe.execute()

        def read(answer: Any) -> tuple[list[tenants_pb2.ApiKey], str]:
            members, records = answer
            found = [_without_digest(_parse_key(record)) for record in records if record is not None]
            return found, members[-1].decode() if len(members) == limit else ""

        return await self._link.require(reading(work, read))

    async def add_key(self, key: tenants_pb2.ApiKey, *, by: str) -> None:
        """`key` includes its digest. Raises NotFound for an unknown tenant, Conflict if it has too many keys."""
        keys = (
            self._keys.keys_required,
            self._keys.tenant(""),
            self._keys.audit,
            self._keys.api_keys,
            self._keys.api_key_digests,
            self._keys.api_key(""),
        )
        expire_s = key.not_after_unix_s and key.not_after_unix_s + _KEPT_AFTER_EXPIRY_S
        fields = (key.tenant, key.id, key.digest.hex(), _serialize(key), expire_s, MAX_KEYS_PER_TENANT, DEFAULT_TENANT)
        answer = await self._link.require(
            reading(lambda redis: redis.eval(_ADD_KEY, len(keys), *keys, *fields, by), int)
        )
        if answer > 0:
            self._memory.remember()
        if answer == -1:
            raise unknown_tenant(key.tenant, "tenant")
        if answer == -2:
            raise Conflict(
                f"{key.tenant} has {MAX_KEYS_PER_TENANT} keys already; no more are allowed", reason="TOO_MANY_KEYS"
            )

    async def revoke_key(self, key_id: str, *, by: str) -> tenants_pb2.ApiKey:
        """Returns the key's record before. Raises NotFound."""
        keys = (self._keys.audit, self._keys.api_keys, self._keys.api_key_digests, self._keys.api_key(""))
        [key] = await self._link.require(
            reading(
                lambda redis: redis.eval(_REVOKE, len(keys), *keys, key_id, by),
                lambda record: [_without_digest(_parse_key(record)) if record else None],
            )
        )
        if key is None:
            raise NotFound(f"no key {key_id[:80]!r}", reason="UNKNOWN_KEY", field="id")
        return key

    async def note(self, action: str, tenant: str, *, by: str, **details: str) -> None:
        """Writes an audit entry about what is not kept here."""
        entry: dict[Any, Any] = {"action": action, "name": tenant, "by": by, **details}
        await self._link.require(
            lambda redis: redis.xadd(self._keys.audit, entry, maxlen=MAX_AUDIT_ENTRIES, approximate=True)
        )

    async def audit(self, limit: int = 1000, before: str = "") -> list[AuditEntry]:
        """The last changes before the one with id `before`, newest first."""
        last = f"({before}" if before else "+"
        return await self._link.require(
            reading(
                lambda redis: redis.xrevrange(self._keys.audit, max=last, count=limit),
                lambda entries: [_parse_audit(entry_id, body) for entry_id, body in entries],
            )
        )


def _serialize(message: tenants_pb2.Tenant | tenants_pb2.ApiKey) -> bytes:
    """Equal for equal records, as what the store adds is left out."""
    if isinstance(message, tenants_pb2.Tenant) and (message.version or message.read_unix_us or message.id):
        copy = tenants_pb2.Tenant()
        copy.CopyFrom(message)
        for name in ("version", "read_unix_us", "id"):
            copy.ClearField(name)
        message = copy
    return message.SerializeToString(deterministic=True)


def _parse_row(record: bytes | None, *others: Any) -> tenants_pb2.Tenant | None:
    return None if record is None else _parse(record, *others)


def _parse(record: bytes, version: bytes, tenant_id: bytes | None) -> tenants_pb2.Tenant:
    tenant = tenants_pb2.Tenant.FromString(record)
    tenant.version, tenant.id = int(version), (tenant_id or b"").decode()
    return tenant


def _parse_audit(entry_id: bytes, body: dict[bytes, bytes]) -> AuditEntry:
    old, new = (
        tenants_pb2.Tenant.FromString(one) if (one := body.pop(name, b"")) else None for name in (b"old", b"new")
    )
    return AuditEntry(entry_id.decode(), {name.decode(): value.decode() for name, value in body.items()}, old, new)


def _parse_key(record: bytes) -> tenants_pb2.ApiKey:
    return tenants_pb2.ApiKey.FromString(record)


def _without_digest(key: tenants_pb2.ApiKey) -> tenants_pb2.ApiKey:
    key.digest = b""
    return key


def _named(tenants: Sequence[tenants_pb2.Tenant], name: str) -> str:
    index = next(i for i, tenant in enumerate(tenants) if tenant.name == name)
    return f"tenants[{index}].version"


def unknown_tenant(name: str, where: str = "name") -> NotFound:
    return NotFound(f"no tenant {json.dumps(name[:80])}", reason="UNKNOWN_TENANT", field=where)


def is_expired(key: tenants_pb2.ApiKey, now_unix_s: float | None = None) -> bool:
    now_unix_s = time.time() if now_unix_s is None else now_unix_s
    return bool(key.not_after_unix_s) and now_unix_s >= key.not_after_unix_s
