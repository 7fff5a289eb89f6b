"""Leases, prefix index and events in Redis. See the package's docstring for what an outage means.

async with MetadataStore.connect("unix:///run/outrider/redis.sock") as store:
    async with store.register(info, address, load):
        ...
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.errors import MAX_MESSAGE_CHARS
from outrider.metadata.connection.reading import reading
from outrider.metadata.connection.timeouts import CALL_TIMEOUT_S, StoreCounters
from outrider.metadata.drafts import DraftStore
from outrider.metadata.erasures import ErasureStore
from outrider.metadata.events import MAX_EVENTS, Event, FieldValue, check_event_id, decode_event, encode_event
from outrider.metadata.keys import ROLES, Keys
from outrider.metadata.plans import PlanStore
from outrider.metadata.tenants.key_memory import KeyMemory
from outrider.metadata.tenants.ledger import LedgerStore
from outrider.metadata.tenants.quota import QuotaStore
from outrider.metadata.tenants.tenants import TenantStore
from outrider.metadata.workers.cordons import CORDON_KEPT_S, CordonStore
from outrider.metadata.workers.directory import (
    LEASE_TTL_S,
    MAX_ID_CHARS,
    Key,
    LeaseRead,
    LeaseRecord,
    WorkerDirectory,
    check_id,
    decode_lease,
)
from outrider.metadata.workers.lease import Lease
from outrider.metadata.workers.prefix import MAX_LOOKUP_BLOCKS, PrefixMirror, chunks
from outrider.rpc.v1 import worker_pb2
from outrider.runtime.supervision import stop

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from outrider.metadata.connection.link import RedisLink

logger = logging.getLogger(__name__)

_TTL_MS = round(LEASE_TTL_S * 1000)

# Id, record, remaining milliseconds and cordon of each, in one answer, because the round trip to a store may be long. A
# worker with an expired lease is removed in the same step, because it may register again between two steps.
_READ_LEASES = f"""
local found = {{}}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('GET', KEYS[2] .. id)
  if record then
    local cordon = redis.call('GETEX', KEYS[3] .. id, 'EX', {CORDON_KEPT_S}) or ''
    found[#found + 1] = {{id, record, redis.call('PTTL', KEYS[2] .. id), cordon}}
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return found
"""
# Worker and number of leading blocks, for those that have the first. One short answer, because a router has a thousand
# running requests, and to parse answers about each block of each worker took longer than the rest of an opening.
_LEADING_BLOCKS = """
local found = {}
-- Ids of workers, as many as the first argument says; then the hashes.
local before = tonumber(ARGV[1]) + 1
for worker = 2, before do
  local id = ARGV[worker]
  -- Of a lease given back nothing is left but an empty string.
  if redis.call('STRLEN', KEYS[1] .. id) > 0 then
    local count = 0
    -- In parts: Lua unpacks 8,000 at most.
    for first = before + 1, #ARGV, 1000 do
      local last = math.min(first + 999, #ARGV)
      local present = redis.call('SMISMEMBER', KEYS[2] .. id, unpack(ARGV, first, last))
      while present[before + count - first + 2] == 1 do count = count + 1 end
      if before + count < last then break end
    end
    if count > 0 then
      found[#found + 1] = id
      found[#found + 1] = count
    end
  end
end
return found
"""


class MetadataStore:
    """Owned by one event loop. No method raises because Redis is unreachable or answers nonsense.

    Requests wait only for `lookup_prefix`, at most 50 ms; everything else takes at most a second.
    """

    def __init__(self, link: RedisLink, counters: StoreCounters, keys: Keys, memory: KeyMemory) -> None:
        self.counters = counters
        self.tenants = TenantStore(link, keys, memory)
        self.quotas = QuotaStore(link, keys)
        self.cordons = CordonStore(link, keys)
        self.ledger = LedgerStore(link, keys)
        self.plans = PlanStore(link, keys)
        self.drafts = DraftStore(link, keys)
        self.erasures = ErasureStore(link, keys)
        self._link = link
        self._keys = keys
        self._directory = WorkerDirectory()
        self._mirrors: dict[Key, PrefixMirror] = {}
        self._leases: set[Lease] = set()
        link.on_recovery.append(self._recovered)

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        namespace: str = "outrider",
        call_timeout_s: float = CALL_TIMEOUT_S,
        keys_required_file: str = "",
    ) -> MetadataStore:
        """Takes the URLs that `address` lists, and connects when first used. No caller waits longer than the timeout.

        Raises ValueError for another kind of URL; never for an unreachable server.
        """
        from outrider.metadata.connection.link import RedisLink

        counters = StoreCounters()
        try:
            link = RedisLink(url, counters, call_timeout_s)
        except ValueError:
            # The URL is not quoted, as it may contain a password.
            raise ValueError("metadata URL: expected redis://, rediss://, unix:// or redis+sentinel://") from None
        return cls(link, counters, Keys(namespace), KeyMemory(keys_required_file))

    async def problem(self) -> str | None:
        """Why the store can never be used as it is; None if it can, or does not answer. Waits a second at most."""
        return await self._link.problem()

    async def __aenter__(self) -> MetadataStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for mirror in self._mirrors.values():
            await stop(mirror.writing)
        await self._link.close()

    @property
    def available(self) -> bool:
        """Whether Redis answered the last call. For reports; callers need not check it before a call."""
        return self._link.available

    # Leases

    def register(self, info: worker_pb2.WorkerInfo, address: str, load: Callable[[], worker_pb2.WorkerLoad]) -> Lease:
        """A lease for `async with`. Raises ValueError for an invalid id, role or address."""
        self._keys.lease(info.role, info.worker_id)
        lease = Lease(self, info, address, load)
        self._leases.add(lease)
        return lease

    async def workers(self, role: worker_pb2.WorkerRole.ValueType | None = None) -> list[LeaseRecord]:
        """Live workers of one role, or all, ordered by id. The last known ones while Redis is unreachable.

        Waits at most a second, so no request should wait for it.
        """
        roles = ROLES if role is None else (role,)
        reads = await self._link.call_in_background(lambda redis: self._read_leases(redis, roles))
        now_s = time.monotonic()
        if reads is not None:
            self._directory.update(reads, now_s)
            self._directory.expire(now_s)
        return self._directory.records(role, now_s)

    @property
    def given_back(self) -> frozenset[Key]:
        """Leases that were given back, and did not expire, by the last read of `workers`."""
        return self._directory.given_back

    @property
    def refused(self) -> Mapping[Key, str]:
        """Leases that cannot be a worker's, by the last read of `workers`, with the reason."""
        return self._directory.refused

    async def write_lease(self, record: LeaseRecord) -> None:
        """One heartbeat: renews the lease and the worker's part of the prefix index for one term."""
        role, worker_id = record.key
        prefix_key = self._keys.prefix(role, worker_id)

        async def work(redis: Redis) -> bool:
            pipe = redis.pipeline(transaction=False)
            # A server whose memory is full still does this, and refuses the record.
            pipe.pexpire(self._keys.lease(role, worker_id), _TTL_MS)
            pipe.set(self._keys.lease(role, worker_id), record.encode(), px=_TTL_MS)
            pipe.sadd(self._keys.workers(role), worker_id)
            pipe.pexpire(prefix_key, _TTL_MS)
            return bool((await pipe.execute())[-1])

        has_prefix = await self._link.call_in_background(work)
        mirror = self._mirrors.get(record.key)
        if mirror is not None and has_prefix is not None:
            # It expired while this process could not renew it, or was lost with the server's data.
            mirror.stale |= bool(mirror.held) and not has_prefix
            self._flush(record.key, mirror)

    async def remove_lease(self, lease: Lease) -> None:
        """Gives the lease back, so that readers drop the worker at once instead of at the end of its term."""
        role, worker_id = lease.record.key
        self._leases.discard(lease)
        if (mirror := self._mirrors.pop(lease.record.key, None)) is not None:
            await stop(mirror.writing)

        async def work(redis: Redis) -> None:
            pipe = redis.pipeline(transaction=False)
            pipe.set(self._keys.lease(role, worker_id), b"", px=_TTL_MS)
            pipe.delete(self._keys.prefix(role, worker_id))
            await pipe.execute()

        await self._link.call_in_background(work)

    async def _read_leases(self, redis: Redis, roles: Sequence[worker_pb2.WorkerRole.ValueType]) -> list[LeaseRead]:
        pipe = redis.pipeline(transaction=False)
        for role in roles:
            keys = self._keys.workers(role), self._keys.lease(role, ""), self._keys.cordon("")
            pipe.eval(_READ_LEASES, len(keys), *keys)
        answers = await pipe.execute()
        return [self._lease_read(role, *row) for role, rows in zip(roles, answers, strict=True) for row in rows]

    def _lease_read(
        self, role: worker_pb2.WorkerRole.ValueType, raw_id: bytes, value: bytes, ttl_ms: int, cordon: bytes
    ) -> LeaseRead:
        worker_id = raw_id.decode(errors="replace")
        key = role, worker_id
        try:
            check_id(worker_id)
            if not value:
                return LeaseRead(key, None)
            if ttl_ms < 0:
                raise ValueError("lease: has no end")
            return LeaseRead(key, decode_lease(key, value, cordon), min(ttl_ms, _TTL_MS) / 1000)
        except ValueError as error:
            self._malformed(error)
            return LeaseRead((role, worker_id[:MAX_ID_CHARS]), None, problem=str(error)[:MAX_MESSAGE_CHARS])

    # Prefix index

    def publish_prefix(
        self,
        role: worker_pb2.WorkerRole.ValueType,
        worker_id: str,
        added: Iterable[bytes],
        removed: Iterable[bytes] = (),
    ) -> asyncio.Task[None]:
        """Records blocks that a worker of this process has cached or evicted. Kept until the lease is given back.

        Returns what writes them, and all further changes until it is done. Raises ValueError for an invalid block hash.
        """
        mirror = self._mirrors.setdefault((role, worker_id), PrefixMirror())
        mirror.apply(added, removed)
        return self._flush((role, worker_id), mirror)

    async def lookup_prefix(
        self, role: worker_pb2.WorkerRole.ValueType, hashes: Sequence[bytes], worker_ids: Collection[str]
    ) -> dict[str, int]:
        """The number of leading blocks of each worker that has the first. Empty while Redis is unreachable.

        It blocks Redis for a time proportional to the workers and blocks.
        """
        if not hashes or not worker_ids:
            return {}
        wanted = list(hashes[:MAX_LOOKUP_BLOCKS])

        async def work(redis: Redis) -> dict[str, int]:
            keys = (self._keys.lease(role, ""), self._keys.prefix(role, ""))
            answer = await redis.eval(_LEADING_BLOCKS, len(keys), *keys, len(worker_ids), *worker_ids, *wanted)
            return {str(raw, errors="replace"): count for raw, count in zip(answer[::2], answer[1::2], strict=True)}

        return await self._link.call(work) or {}

    def _flush(self, key: Key, mirror: PrefixMirror) -> asyncio.Task[None]:
        if mirror.writing is None or mirror.writing.done():
            mirror.writing = asyncio.create_task(self._write_changes(key, mirror), name="write prefix index")
        return mirror.writing

    async def _write_changes(self, key: Key, mirror: PrefixMirror) -> None:
        while mirror.dirty:
            anew = mirror.stale
            added, removed = (mirror.take_all(), []) if anew else mirror.take_pending()
            if not await self._write_prefix(key, added, removed, anew=anew):
                # Perhaps a part of it arrived.
                mirror.stale = True
                return

    async def _write_prefix(self, key: Key, added: list[bytes], removed: list[bytes], *, anew: bool) -> bool:
        prefix_key = self._keys.prefix(*key)

        async def work(redis: Redis) -> bool:
            pipe = redis.pipeline(transaction=True)
            if anew:
                pipe.delete(prefix_key)
            for chunk in chunks(added):
                pipe.sadd(prefix_key, *chunk)
            for chunk in chunks(removed):
                pipe.srem(prefix_key, *chunk)
            pipe.pexpire(prefix_key, _TTL_MS)
            await pipe.execute()
            return True

        return await self._link.call_in_background(work) is not None

    # Events

    async def emit(self, kind: str, fields: Mapping[str, FieldValue]) -> None:
        """Adds an event, without any request's text, to the shared stream. Drops and counts it if Redis is unreachable.

        Raises ValueError for a kind that is no lower-case name.
        """
        body = encode_event(kind, fields)
        written = await self._link.call_in_background(
            lambda redis: redis.xadd(self._keys.events, body, maxlen=MAX_EVENTS, approximate=True)
        )
        if written is None:
            self.counters.num_dropped_events += 1

    async def events(self, since: str | None = None, *, limit: int = 1000) -> list[Event]:
        """Events after the id `since`, or from the oldest kept; oldest first. Empty while Redis is unreachable."""
        if since is not None:
            check_event_id(since)
        start = "-" if since is None else f"({since}"
        found = await self._link.call_in_background(
            reading(lambda redis: redis.xrange(self._keys.events, min=start, count=limit), self._decoded)
        )
        return found or []

    async def last_events(self, limit: int) -> list[Event]:
        """The last `limit` events, oldest first. Empty while Redis is unreachable."""
        found = await self._link.call_in_background(
            reading(lambda redis: redis.xrevrange(self._keys.events, count=limit), self._decoded)
        )
        return (found or [])[::-1]

    def _decoded(self, entries: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Event]:
        events = []
        for event_id, body in entries:
            try:
                events.append(decode_event(event_id, body))
            except ValueError as error:
                self._malformed(error)
        return events

    def _recovered(self) -> None:
        self._directory.extend(time.monotonic())
        for lease in self._leases:
            lease.wake()

    def _malformed(self, error: ValueError) -> None:
        self.counters.num_malformed += 1
        logger.debug("ignored: %s", error)
