"""Tenants and keys: the checks on what operators write, and the calls that write it.

Everything is checked before anything is written; an error names its field.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import sha256

from outrider.errors import InvalidRequest
from outrider.limits import (
    MAX_DRAFT_TOKENS,
    MAX_MODEL_CHARS,
    MAX_TENANT_WEIGHT,
    MAX_TENANTS_AT_ONCE,
    MAX_WAIT_US,
    MAX_WEIGHT,
    check_weight,
)
from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind
from outrider.metadata.tenants.tenants import AuditEntry, TenantStore
from outrider.rpc.access.roles import current_caller
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import tenants_pb2 as tenants

MAX_MODELS = 64
MAX_PAGE = 1000
_MAX_EVENTS = 20
"""Tenants of one call that get an event each."""
_MAX_PER_SECOND, _MAX_TOKENS, _MAX_CONCURRENT = 1e6, 10**12, 10**6
_AUDIT_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_SCOPES = (tenants.KEY_SCOPE_INFER, tenants.KEY_SCOPE_METRICS, tenants.KEY_SCOPE_ADMIN)
KEY_PREFIX = "ork-"


class Tenancy:
    """The operators' calls on tenants and keys."""

    def __init__(
        self, store: TenantStore, events: EventWriter, erase: Callable[[str], Awaitable[Sequence[str]]]
    ) -> None:
        """`erase` carries out what a tenant's deletion orders, and names who has not obeyed yet."""
        self._store = store
        self._events = events
        self._erase = erase

    async def ListTenants(self, request: control.ListTenantsRequest, _: object) -> control.ListTenantsResponse:
        size = _page_size(request.page_size)
        if request.page_token:
            check_name("page_token", request.page_token)
        page, token, total = await self._store.page(request.page_token, size)
        return control.ListTenantsResponse(tenants=page, next_page_token=token, num_tenants=total)

    async def GetTenant(self, request: control.GetTenantRequest, _: object) -> control.GetTenantResponse:
        check_name("name", request.name)
        return control.GetTenantResponse(tenant=await self._store.get(request.name))

    async def PutTenants(self, request: control.PutTenantsRequest, _: object) -> control.PutTenantsResponse:
        check_tenants(request.tenants)
        changes = await self._store.put(request.tenants, by=caller(), dry_run=request.dry_run)
        if not request.dry_run:
            self._tell([change.name for change in changes if change.change != control.CHANGE_NONE], "applied")
        return control.PutTenantsResponse(changes=changes)

    async def DeleteTenant(self, request: control.DeleteTenantRequest, _: object) -> control.DeleteTenantResponse:
        check_name("name", request.name)
        num_keys = await self._store.delete(request.name, by=caller())
        self._tell([request.name], "deleted")
        return control.DeleteTenantResponse(num_revoked_keys=num_keys, pending=await self._erase(request.name))

    async def ListKeys(self, request: control.ListKeysRequest, _: object) -> control.ListKeysResponse:
        if request.tenant:
            check_name("tenant", request.tenant)
        page, token = await self._store.page_of_keys(request.tenant, request.page_token, _page_size(request.page_size))
        return control.ListKeysResponse(keys=page, next_page_token=token)

    async def CreateKey(self, request: control.CreateKeyRequest, _: object) -> control.CreateKeyResponse:
        check_name("tenant", request.tenant)
        scopes = list(dict.fromkeys(request.scopes)) or [tenants.KEY_SCOPE_INFER]
        for i, scope in enumerate(scopes):
            if scope not in _SCOPES:
                raise InvalidRequest(f"scopes[{i}]", f"{scope} is none of infer, metrics and admin")
        now_s = int(time.time())
        if request.not_after_unix_s and not now_s < request.not_after_unix_s < 2**33:
            raise InvalidRequest("not_after_unix_s", f"{request.not_after_unix_s} is in the past, or after 2242")
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        info = tenants.ApiKey(
            id=f"key-{secrets.token_hex(6)}",
            tenant=request.tenant,
            scopes=scopes,
            created_unix_s=now_s,
            not_after_unix_s=request.not_after_unix_s,
            digest=sha256(key.encode()).digest(),
        )
        await self._store.add_key(info, by=caller())
        self._tell([request.tenant], "key created", key=info.id)
        info.digest = b""
        return control.CreateKeyResponse(info=info, key=key)

    async def RevokeKey(self, request: control.RevokeKeyRequest, _: object) -> control.RevokeKeyResponse:
        key = await self._store.revoke_key(request.id, by=caller())
        self._tell([key.tenant], "key revoked", key=request.id)
        return control.RevokeKeyResponse(info=key)

    async def ListAudit(self, request: control.ListAuditRequest, _: object) -> control.ListAuditResponse:
        if request.page_token and not _AUDIT_ID.fullmatch(request.page_token):
            raise InvalidRequest(
                "page_token", f"{request.page_token[:60]!r} is not the page token of an earlier answer"
            )
        size = _page_size(request.page_size)
        page = await self._store.audit(size, request.page_token)
        return control.ListAuditResponse(
            entries=map(_audit_entry, page), next_page_token=page[-1].id if len(page) == size else ""
        )

    def _tell(self, names: Sequence[str], action: str, **more: str) -> None:
        """Writes events: one per tenant, or a single one with their number when a file changed many."""
        if len(names) > _MAX_EVENTS:
            self._events.emit(EventKind.TENANT_CHANGED, {"action": action, "by": caller(), "tenants": len(names)})
            return
        for name in names:
            fields = {"tenant": name, "action": action, "by": caller(), **more}
            self._events.emit(EventKind.TENANT_CHANGED, fields)


def _audit_entry(entry: AuditEntry) -> control.AuditEntry:
    details = {name: value for name, value in entry.fields.items() if value}
    return control.AuditEntry(
        id=entry.id,
        at_unix_ms=int(entry.id.partition("-")[0]),
        action=details.pop("action", ""),
        by=details.pop("by", ""),
        # In an entry about a key the name is its tenant; the key's id is among the details.
        name=details.pop("name", "") or details.pop("tenant", ""),
        details=details,
        old=entry.old,
        new=entry.new,
    )


def check_tenants(given: Iterable[tenants.Tenant]) -> None:
    """Raises InvalidRequest for the first field that is wrong."""
    given = list(given)
    if not 1 <= len(given) <= MAX_TENANTS_AT_ONCE:
        raise InvalidRequest("tenants", f"{len(given)} tenants; 1 to {MAX_TENANTS_AT_ONCE} are taken at once")
    seen: dict[str, int] = {}
    for i, tenant in enumerate(given):
        _check_tenant(f"tenants[{i}]", tenant)
        if (first := seen.setdefault(tenant.name, i)) != i:
            raise InvalidRequest(f"tenants[{i}].name", f"{tenant.name} is already at tenants[{first}]")


def _check_tenant(where: str, tenant: tenants.Tenant) -> None:
    check_name(f"{where}.name", tenant.name)
    if tenant.weight:
        check_weight(f"{where}.weight", tenant.weight, MAX_TENANT_WEIGHT)
    if len(tenant.models) > MAX_MODELS:
        raise InvalidRequest(f"{where}.models", f"{len(tenant.models)} models; at most {MAX_MODELS} are taken")
    for i, model in enumerate(tenant.models):
        if not 1 <= len(model) <= MAX_MODEL_CHARS or not model.isprintable():
            raise InvalidRequest(f"{where}.models[{i}]", f"{model[:80]!r} is not the name of a model")
    for field in tenant.DESCRIPTOR.fields:
        if (
            field.enum_type is not None
            and (value := getattr(tenant, field.name)) not in field.enum_type.values_by_number
        ):
            raise InvalidRequest(f"{where}.{field.name}", f"{value} is none of its values")
    _check_speculation(f"{where}.speculation", tenant.speculation)
    quota = tenant.quota
    _check_bound(where, quota, "requests_per_second", _MAX_PER_SECOND)
    _check_bound(where, quota, "tokens_per_minute", _MAX_TOKENS)
    _check_bound(where, quota, "concurrent_requests", _MAX_CONCURRENT)
    _check_burst(where, quota, "burst_requests", "requests_per_second", _MAX_PER_SECOND)
    _check_burst(where, quota, "burst_tokens", "tokens_per_minute", _MAX_TOKENS)


def _check_speculation(where: str, policy: tenants.SpeculationPolicy) -> None:
    if policy.HasField("max_draft_tokens") and policy.max_draft_tokens > MAX_DRAFT_TOKENS:
        raise InvalidRequest(f"{where}.max_draft_tokens", f"{policy.max_draft_tokens} is above {MAX_DRAFT_TOKENS}")
    if policy.HasField("max_wait_ms") and policy.max_wait_ms * 1000 > MAX_WAIT_US:
        raise InvalidRequest(f"{where}.max_wait_ms", f"{policy.max_wait_ms} is above {MAX_WAIT_US // 1000}")
    if policy.weight:
        check_weight(f"{where}.weight", policy.weight, MAX_WEIGHT)
    if policy.HasField("min_acceptance") and not 0 < policy.min_acceptance <= 1:
        message = f"{policy.min_acceptance:g} is not above 0 and at most 1; leave it out for no floor"
        raise InvalidRequest(f"{where}.min_acceptance", message)


def _check_burst(where: str, quota: tenants.Quota, name: str, rate: str, most: float) -> None:
    _check_bound(where, quota, name, most)
    if quota.HasField(name) and not quota.HasField(rate):  # type: ignore[arg-type]  # Its fields.
        raise InvalidRequest(f"{where}.quota.{name}", f"needs {rate}")


def _check_bound(where: str, quota: tenants.Quota, name: str, most: float) -> None:
    if not quota.HasField(name):  # type: ignore[arg-type]  # One of its fields.
        return
    value: float = getattr(quota, name)
    if not (0 < value <= most) or not math.isfinite(value):
        message = f"{value:g} is not above 0 and at most {most:g}; leave it out for no bound"
        raise InvalidRequest(f"{where}.quota.{name}", message)


def check_name(where: str, name: str) -> None:
    """Raises InvalidRequest for an invalid tenant name."""
    if not _NAME.fullmatch(name):
        allowed = "1 to 63 of a-z, 0-9, '-', '_' and '.', the first and last a letter or digit"
        raise InvalidRequest(where, f"{name[:80]!r} is not {allowed}")


def _page_size(asked: int) -> int:
    if asked > MAX_PAGE:
        raise InvalidRequest("page_size", f"{asked}; at most {MAX_PAGE}")
    return asked or MAX_PAGE


def caller() -> str:
    """The identity of the present call's caller, for the audit."""
    return current_caller().name or "local"
