"""Versions of drafts and their rollouts in Redis. The leading control plane writes versions and evidence; rollouts are
changed by operators too, and every change of one also writes the audit stream in the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from outrider.errors import Unavailable
from outrider.metadata.connection.part import StorePart
from outrider.metadata.connection.reading import reading
from outrider.metadata.tenants.tenants import MAX_AUDIT_ENTRIES
from outrider.rpc.v1 import drafts_pb2

M = TypeVar("M", drafts_pb2.DraftVersion, drafts_pb2.Rollout, drafts_pb2.RolloutEvidence)

# The second argument is the rollout that is replaced.
_PUT_ROLLOUT = f"""
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', {MAX_AUDIT_ENTRIES}, '*', 'action', ARGV[4], 'name', ARGV[1],
  'tenant', ARGV[5], 'share', ARGV[6], 'reason', ARGV[7], 'by', ARGV[8])
return 1
"""
_DELETE_VERSION = f"""
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', {MAX_AUDIT_ENTRIES}, '*', 'action', 'delete draft', 'name', ARGV[1],
  'by', ARGV[2])
return 1
"""


class DraftStore(StorePart):
    """What cannot be parsed is left out."""

    async def versions(self, epoch: int = 0) -> list[drafts_pb2.DraftVersion]:
        """Raises Unavailable, as do `rollouts` and `evidence`. `epoch`: that of the leader that reads them. If Redis
        has another one it has lost its data, and counts as unreachable."""
        return list((await self._read(self._keys.drafts, drafts_pb2.DraftVersion, epoch)).values())

    async def rollouts(self, epoch: int = 0) -> dict[str, drafts_pb2.Rollout]:
        """By draft version."""
        return await self._read(self._keys.rollouts, drafts_pb2.Rollout, epoch)

    async def evidence(self) -> dict[str, drafts_pb2.RolloutEvidence]:
        return await self._read(self._keys.rollout_evidence, drafts_pb2.RolloutEvidence)

    async def put_versions(self, versions: Mapping[str, drafts_pb2.DraftVersion]) -> bool:
        """False while Redis is unreachable, as `put_evidence`."""
        return await self._write(self._keys.drafts, versions)

    async def put_evidence(self, evidence: Mapping[str, drafts_pb2.RolloutEvidence]) -> bool:
        return await self._write(self._keys.rollout_evidence, evidence)

    async def put_rollout(self, rollout: drafts_pb2.Rollout, action: str, instead_of: drafts_pb2.Rollout) -> bool:
        """False, with nothing written, if another rollout is there than `instead_of`: an empty one stands for none.
        Raises Unavailable."""
        before = instead_of.SerializeToString(deterministic=True)
        value, keys = rollout.SerializeToString(deterministic=True), (self._keys.rollouts, self._keys.audit)
        about = rollout.draft, before, value, action, rollout.tenant, f"{rollout.share:g}", rollout.reason, rollout.by
        return bool(await self._link.require(lambda redis: redis.eval(_PUT_ROLLOUT, len(keys), *keys, *about)))

    async def delete_version(self, version: str, *, by: str) -> bool:
        """With its rollout. False if it is not there. Raises Unavailable."""
        keys = self._keys.drafts, self._keys.rollouts, self._keys.rollout_evidence, self._keys.audit
        return bool(await self._link.require(lambda redis: redis.eval(_DELETE_VERSION, len(keys), *keys, version, by)))

    async def _epoch(self) -> int:
        return (
            await self._link.call_in_background(
                reading(lambda redis: redis.get(self._keys.leader_epoch), lambda said: int(said or 0))
            )
            or 0
        )

    async def _read(self, key: str, kind: type[M], epoch: int = 0) -> dict[str, M]:
        def read(answer: Any) -> dict[str, M]:
            found: dict[str, M] = {}
            for name, value in answer.items():
                with suppress(DecodeError, UnicodeDecodeError):
                    found[name.decode()] = kind.FromString(value)
            return found

        found = await self._link.require(reading(lambda redis: redis.hgetall(key), read))
        # Read last: what was lost meanwhile is noticed.
        if epoch and epoch != await self._epoch():
            raise Unavailable("the metadata store has lost its data", reason="NO_METADATA", retry_after_s=1.0)
        return found

    async def _write(self, key: str, values: Mapping[str, M]) -> bool:
        mapping = {name: value.SerializeToString() for name, value in values.items()}
        if not mapping:
            return True
        return await self._link.call_in_background(lambda redis: redis.hset(key, mapping=mapping)) is not None
