"""Tenants and keys through the operator's API: who may write them, and what may not be written."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest
from outrider.errors import Code, OutriderError
from outrider.limits import MAX_TENANTS_AT_ONCE
from outrider.metadata import MetadataStore
from outrider.rpc.access.roles import ClusterSecret, Role, bearer
from outrider.rpc.channel import create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, tenants_pb2
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control

SECRET = ClusterSecret(b"0123456789abcdef")
OPERATOR = bearer(SECRET.token(Role.OPERATOR))
Tenant, Quota = tenants_pb2.Tenant, tenants_pb2.Quota
Stub = Any


@pytest.fixture
async def stub(fleet: Any) -> AsyncIterator[Stub]:
    config = ControlConfig(secret=SECRET)
    async with running_control(config, fleet.store) as life, create_channel(life.address) as channel:
        yield control_pb2_grpc.ControlServiceStub(channel)


async def refusal(call: Awaitable[Any]) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def put(stub: Stub, *tenants: Tenant, metadata: Any = OPERATOR) -> Awaitable[control_pb2.PutTenantsResponse]:
    return stub.PutTenants(control_pb2.PutTenantsRequest(tenants=tenants), metadata=metadata)


async def test_only_operators_and_admin_keys_may_operate(stub: Stub) -> None:
    assert (await refusal(put(stub, Tenant(name="a"), metadata=()))).reason == "NO_CREDENTIAL"
    assert (await refusal(put(stub, Tenant(name="a"), metadata=bearer("ork-x")))).code is Code.UNAUTHENTICATED
    gateway = bearer(SECRET.token(Role.GATEWAY))
    assert (await refusal(put(stub, Tenant(name="a"), metadata=gateway))).reason == "WRONG_ROLE"
    await put(stub, Tenant(name="a"))
    keys = {}
    for scope in (tenants_pb2.KEY_SCOPE_INFER, tenants_pb2.KEY_SCOPE_ADMIN):
        request = control_pb2.CreateKeyRequest(tenant="a", scopes=[scope])
        keys[scope] = (await stub.CreateKey(request, metadata=OPERATOR)).key
    infer, admin = bearer(keys[tenants_pb2.KEY_SCOPE_INFER]), bearer(keys[tenants_pb2.KEY_SCOPE_ADMIN])
    assert (await refusal(put(stub, Tenant(name="b"), metadata=infer))).reason == "WRONG_SCOPE"
    await put(stub, Tenant(name="b"), metadata=admin)


async def test_every_change_is_audited_with_who_made_it(stub: Stub, fleet: Any) -> None:
    store: MetadataStore = fleet.store
    await put(stub, Tenant(name="a"))
    made = await stub.CreateKey(control_pb2.CreateKeyRequest(tenant="a"), metadata=OPERATOR)
    await stub.RevokeKey(control_pb2.RevokeKeyRequest(id=made.info.id), metadata=OPERATOR)
    await stub.DeleteTenant(control_pb2.DeleteTenantRequest(name="a"), metadata=OPERATOR)
    entries = await store.tenants.audit()
    actions = [(entry.fields["action"], entry.fields["by"]) for entry in reversed(entries)]
    assert actions == [(what, "operator") for what in ("put tenant", "create key", "revoke key", "delete tenant")]
    assert made.key not in str(entries)


async def test_the_audit_says_what_a_record_was_and_what_it_became(stub: Stub) -> None:
    await put(stub, Tenant(name="a", weight=2))
    await put(stub, Tenant(name="a", weight=3, quota=Quota(tokens_per_minute=9)))
    made = await stub.CreateKey(control_pb2.CreateKeyRequest(tenant="a"), metadata=OPERATOR)
    off = tenants_pb2.SPECULATION_SETTING_OFF
    await stub.SetSpeculation(control_pb2.SetSpeculationRequest(tenant="a", setting=off, ttl_ms=60), metadata=OPERATOR)
    await stub.DeleteTenant(control_pb2.DeleteTenantRequest(name="a"), metadata=OPERATOR)

    async def page(token: str) -> control_pb2.ListAuditResponse:
        return await stub.ListAudit(control_pb2.ListAuditRequest(page_size=3, page_token=token), metadata=OPERATOR)

    first = await page("")
    second = await page(first.next_page_token)
    assert [(one.action, one.name, one.by) for one in (*first.entries, *second.entries)] == [
        (action, "a", "operator")
        for action in ("delete tenant", "set speculation", "create key", "put tenant", "put tenant")
    ]
    assert second.next_page_token == ""
    deleted, spoken, key = first.entries
    changed, created = second.entries
    assert (created.HasField("old"), created.new.weight) == (False, 2)
    assert (changed.old.weight, changed.new.weight, changed.new.quota.tokens_per_minute) == (2, 3, 9)
    assert (deleted.old.weight, deleted.HasField("new")) == (3, False)
    assert dict(key.details) == {"id": made.info.id}
    assert spoken.details["to"] == "off" and int(spoken.details["until_unix_ms"]) > spoken.at_unix_ms
    assert made.key not in str(first) and (await refusal(page("1-x"))).field == "page_token"
    infer = stub.ListAudit(control_pb2.ListAuditRequest(), metadata=bearer(SECRET.token(Role.GATEWAY)))
    assert (await refusal(infer)).reason == "WRONG_ROLE"


async def test_a_key_is_said_once_and_listed_without_its_hash(stub: Stub) -> None:
    await put(stub, Tenant(name="a"))
    request = control_pb2.CreateKeyRequest(tenant="a", not_after_unix_s=int(time.time()) + 60)
    made = [await stub.CreateKey(request, metadata=OPERATOR) for _ in range(2)]
    assert made[0].key != made[1].key and all(len(one.key) > 40 for one in made)
    listed = await stub.ListKeys(control_pb2.ListKeysRequest(tenant="a"), metadata=OPERATOR)
    assert sorted(key.id for key in listed.keys) == sorted(one.info.id for one in made)
    assert all(not key.digest and list(key.scopes) == [tenants_pb2.KEY_SCOPE_INFER] for key in listed.keys)


async def test_tenants_come_in_pages(stub: Stub) -> None:
    names = [f"t{number:03}" for number in range(25)]
    await put(stub, *(Tenant(name=name) for name in names))
    seen, token = [], ""
    while True:
        request = control_pb2.ListTenantsRequest(page_size=10, page_token=token)
        page = await stub.ListTenants(request, metadata=OPERATOR)
        assert page.num_tenants == 25
        seen += [tenant.name for tenant in page.tenants]
        if not (token := page.next_page_token):
            break
    assert seen == names


def beside(**fields: Any) -> list[Tenant]:
    """A good tenant, and one with these fields."""
    return [Tenant(name="a"), Tenant(**{"name": "b", **fields})]


BAD: list[tuple[list[Tenant], str]] = [
    (beside(name="a"), "tenants[1].name"),
    (beside(name=""), "tenants[1].name"),
    (beside(name="b\n"), "tenants[1].name"),
    (beside(name="B"), "tenants[1].name"),
    (beside(quota=Quota(tokens_per_minute=0)), "tenants[1].quota.tokens_per_minute"),
    (beside(quota=Quota(requests_per_second=-1)), "tenants[1].quota.requests_per_second"),
    (beside(quota=Quota(requests_per_second=math.nan)), "tenants[1].quota.requests_per_second"),
    (beside(weight=-1), "tenants[1].weight"),
    (beside(models=["m", ""]), "tenants[1].models[1]"),
    ([], "tenants"),
    ([Tenant(name=f"t{number}") for number in range(MAX_TENANTS_AT_ONCE + 1)], "tenants"),
]


async def test_what_is_wrong_is_named_by_its_field_and_nothing_is_written(stub: Stub) -> None:
    for given, field in BAD:
        error = await refusal(put(stub, *given))
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, field)
    listed = await stub.ListTenants(control_pb2.ListTenantsRequest(), metadata=OPERATOR)
    assert listed.num_tenants == 0


async def test_a_key_for_nobody_with_an_unknown_scope_or_in_the_past_is_refused(stub: Stub) -> None:
    def create(**fields: Any) -> Awaitable[Any]:
        return stub.CreateKey(control_pb2.CreateKeyRequest(**fields), metadata=OPERATOR)

    assert (await refusal(create(tenant="nobody"))).field == "tenant"
    assert (await refusal(create(tenant="default", scopes=[9]))).field == "scopes[0]"
    assert (await refusal(create(tenant="default", not_after_unix_s=1))).field == "not_after_unix_s"
    assert (await refusal(create(tenant="a\x00b"))).field == "tenant"
