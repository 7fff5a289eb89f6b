"""Authentication: finds the tenant of a client's API key, and checks whether the key's scopes allow the call.

Keys are looked up by their SHA-256. A valid key is cached for 5 s, an invalid one for 1 s. While the store is
unreachable, the last known answer is used for up to an hour. Until the first key is created, every client is the tenant
`default`. A store without data answers as if it were unreachable, until a control plane has told what it knows.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from outrider.errors import PermissionDenied, Unauthenticated, Unavailable
from outrider.metadata.connection.timeouts import CALL_TIMEOUT_S
from outrider.metadata.tenants.tenants import DEFAULT_TENANT, FoundKey, TenantStore, is_expired
from outrider.rpc.access.roles import NO_ROLES, Access, Caller, Role
from outrider.rpc.enums import value_name
from outrider.rpc.v1 import tenants_pb2

_FRESH_S = 5.0
_FRESH_WITHOUT_KEY_S = 1.0
_LAST_KNOWN_S = 3600.0
_MAX_KNOWN = 10_000
_MAX_KEY_CHARS = 512
K = TypeVar("K")
V = TypeVar("V")


def default_tenant(read_unix_us: int = 0) -> tenants_pb2.Tenant:
    """The tenant where none is recorded: every model, no quota."""
    return tenants_pb2.Tenant(name=DEFAULT_TENANT, read_unix_us=read_unix_us)


@dataclass(slots=True)
class _Known:
    found: FoundKey
    read_s: float
    reading: asyncio.Task[FoundKey | None] | None = None


@dataclass(slots=True)
class KeyGuard:
    """Admits callers by their API keys. Without a store every caller is the default tenant, unless `required`."""

    store: TenantStore | None
    required: bool = False
    """Whether a key is needed although none is known to exist. Set permanently once the store reports one."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    _known: OrderedDict[bytes | None, _Known] = field(default_factory=OrderedDict)
    _wrong: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    """Digest → when the store answered that no key has it."""

    async def admit(self, access: Access, token: str, roles: frozenset[Role] = NO_ROLES) -> Caller:
        """Raises Unauthenticated without a valid key, PermissionDenied if its scopes do not allow `access`, and
        Unavailable if the store is unreachable and no answer is known.
        """
        if self.store is None and not self.required:
            return Caller("", default_tenant())
        nobody = await self._find(None)
        if not self.required:
            return Caller("", nobody.tenant or default_tenant(nobody.read_unix_us))
        if not token:
            message = "no API key: send it as the header `Authorization: Bearer KEY`"
            raise Unauthenticated(message, reason="API_KEY_MISSING")
        digest = hashlib.sha256(token[:_MAX_KEY_CHARS].encode()).digest()
        found = await self._find(digest)
        return self._checked(found, digest, access)

    async def _check_again(self, digest: bytes, access: Access) -> None:
        """Raises like `admit`, for a caller that was admitted before."""
        self._checked(await self._find(digest), digest, access)

    def _checked(self, found: FoundKey, digest: bytes, access: Access) -> Caller:
        key = found.key
        # The key was found by this digest. It is compared again, in constant time, in case the store answers wrongly.
        if not hmac.compare_digest(key.digest if key is not None else bytes(len(digest)), digest) or key is None:
            raise Unauthenticated("the API key is not valid")
        if is_expired(key, self.wall_clock()):
            raise Unauthenticated(f"the API key {key.id} has expired", reason="API_KEY_EXPIRED")
        if access.scopes.isdisjoint(key.scopes):
            opened = ", ".join(scope_name(scope) for scope in key.scopes)
            raise PermissionDenied(f"the API key {key.id} permits only: {opened}", reason="WRONG_SCOPE")
        if found.tenant is None and key.tenant != DEFAULT_TENANT:
            raise Unauthenticated("the API key is not valid")
        return Caller(
            key.id, found.tenant or default_tenant(found.read_unix_us), partial(self._check_again, digest, access)
        )

    async def _find(self, digest: bytes | None) -> FoundKey:
        """From the cache while that is fresh. Else a request with a known answer waits at most 50 ms."""
        known, now_s = self._known.get(digest), self.clock()
        if known is None:
            return await self._first(digest, now_s)
        if now_s - known.read_s < _FRESH_S:
            return known.found
        if known.reading is None:
            known.reading = asyncio.create_task(self._read(digest), name="find API key")
        # Another request may wait for the same read and clear `known.reading` first.
        reading = known.reading
        holds = now_s - known.read_s < _LAST_KNOWN_S
        await asyncio.wait({reading}, timeout=CALL_TIMEOUT_S if holds else None)
        found = reading.result() if reading.done() else None
        if reading.done() and known.reading is reading:
            known.reading = None
        if found is None and not holds:
            raise _away()
        return found or known.found

    async def _first(self, digest: bytes | None, now_s: float) -> FoundKey:
        """Reads a key that is not in the cache."""
        if digest is not None and now_s - self._wrong.get(digest, -math.inf) < _FRESH_WITHOUT_KEY_S:
            return NO_SUCH_KEY
        found = await self._read(digest)
        if found is None:
            raise _away()
        return found

    async def _read(self, digest: bytes | None) -> FoundKey | None:
        """None while the store is unreachable."""
        found = await self.store.find(digest) if self.store is not None else None
        if found is None:
            return None
        self.required |= found.keys_required
        if digest is None or found.key is not None:
            _keep(self._known, digest, _Known(found, self.clock()))
        else:
            self._known.pop(digest, None)
            _keep(self._wrong, digest, self.clock())
        return found


NO_SUCH_KEY = FoundKey(keys_required=True, key=None, tenant=None)


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    """Adds to a bounded cache. Valid and invalid keys have separate caches, so that invented keys evict none."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _MAX_KNOWN:
        kept.popitem(last=False)


def _away() -> Unavailable:
    message = "API keys cannot be checked: the metadata store does not answer, or no control plane has used it yet"
    return Unavailable(message, reason="NO_METADATA", retry_after_s=1.0)


def scope_name(scope: tenants_pb2.KeyScope.ValueType) -> str:
    """infer, metrics or admin."""
    return value_name(tenants_pb2.KeyScope.DESCRIPTOR, scope)


def check_model(tenant: tenants_pb2.Tenant, model: str) -> None:
    """Raises PermissionDenied for a model that the tenant may not use, whether it is served or not."""
    if not may_ask(tenant, model):
        message = f"{tenant.name} may not ask for {model[:200]!r}"
        raise PermissionDenied(message, reason="MODEL_NOT_ALLOWED", field="model")


def may_ask(tenant: tenants_pb2.Tenant, model: str) -> bool:
    return not tenant.models or model in tenant.models
