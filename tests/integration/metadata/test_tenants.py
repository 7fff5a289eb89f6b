"""Tenants and keys on a real server."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
import redis
from outrider.errors import Conflict, NotFound, Unavailable
from outrider.metadata import MetadataStore
from outrider.metadata.tenants.tenants import DEFAULT_TENANT, MAX_KEYS_PER_TENANT, is_expired
from outrider.rpc.v1 import control_pb2, policy_pb2, tenants_pb2

Tenant, Quota, ApiKey = tenants_pb2.Tenant, tenants_pb2.Quota, tenants_pb2.ApiKey


def key_of(tenant: str, number: int = 1, **fields: Any) -> ApiKey:
    digest = hashlib.sha256(f"secret {tenant} {number}".encode()).digest()
    return ApiKey(id=f"key-{number}", tenant=tenant, scopes=[tenants_pb2.KEY_SCOPE_INFER], digest=digest, **fields)


async def test_what_was_put_is_found_by_name_and_in_order(store: MetadataStore, reader: MetadataStore) -> None:
    given = [Tenant(name=name, weight=2, quota=Quota(tokens_per_minute=9)) for name in ("b", "a.x", "a-x", "c")]
    changes = await store.tenants.put(given, by="me")
    assert [(change.name, change.version, change.change) for change in changes] == [
        (tenant.name, 1, control_pb2.CHANGE_CREATED) for tenant in given
    ]
    first, token, total = await reader.tenants.page("", 3)
    second, end, _ = await reader.tenants.page(token, 3)
    assert ([tenant.name for tenant in first], [tenant.name for tenant in second]) == (["a-x", "a.x", "b"], ["c"])
    assert (end, total) == ("", 4)
    found = await reader.tenants.get("b")
    assert found.id
    assert found == Tenant(name="b", weight=2, quota=Quota(tokens_per_minute=9), version=1, id=found.id)


async def test_a_tenant_that_is_deleted_while_a_page_is_read_does_not_end_the_list(
    store: MetadataStore, raw: redis.Redis
) -> None:
    await store.tenants.put([Tenant(name=name) for name in ("a", "b", "c")], by="me")
    # Its name was read before, and its record after.
    raw.delete("outrider:tenant:b")
    page, token, _ = await store.tenants.page("", 2)
    assert ([one.name for one in page], token) == (["a"], "b")
    assert [one.name for one in (await store.tenants.page(token, 2))[0]] == ["c"]


async def test_a_change_counts_the_version_and_none_does_not(store: MetadataStore) -> None:
    await store.tenants.put([Tenant(name="a")], by="me")
    (same,) = await store.tenants.put([Tenant(name="a", version=1)], by="me")
    (changed,) = await store.tenants.put([Tenant(name="a", weight=3)], by="me")
    assert (same.change, same.version) == (control_pb2.CHANGE_NONE, 1)
    assert (changed.change, changed.version) == (control_pb2.CHANGE_UPDATED, 2)
    assert [entry.fields["action"] for entry in await store.tenants.audit()] == ["put tenant"] * 2


async def test_where_one_version_is_old_nothing_is_changed(store: MetadataStore) -> None:
    await store.tenants.put([Tenant(name="a"), Tenant(name="b")], by="me")
    with pytest.raises(Conflict) as caught:
        await store.tenants.put([Tenant(name="a", weight=5), Tenant(name="b", version=7)], by="me")
    assert caught.value.field == "tenants[1].version"
    assert (await store.tenants.get("a")).weight == 0


async def test_a_dry_run_says_what_would_be_and_changes_nothing(store: MetadataStore) -> None:
    (change,) = await store.tenants.put([Tenant(name="a")], by="me", dry_run=True)
    assert change.change == control_pb2.CHANGE_CREATED
    with pytest.raises(NotFound):
        await store.tenants.get("a")
    assert await store.tenants.audit() == []


async def test_a_key_is_found_by_its_hash_with_its_tenant(store: MetadataStore, reader: MetadataStore) -> None:
    await store.tenants.put([Tenant(name="a", weight=2)], by="me")
    await store.tenants.keep_required()
    nobody = await reader.tenants.find(None)
    assert nobody is not None and not nobody.keys_required
    key = key_of("a")
    await store.tenants.add_key(key, by="me")
    found = await reader.tenants.find(key.digest)
    assert found is not None and found.keys_required and found.key == key
    assert found.tenant is not None and (found.tenant.name, found.tenant.weight) == ("a", 2)


async def test_a_revoked_key_is_gone_and_the_door_stays_closed(store: MetadataStore) -> None:
    await store.tenants.put([Tenant(name="a")], by="me")
    key = key_of("a")
    await store.tenants.add_key(key, by="me")
    assert (await store.tenants.revoke_key(key.id, by="you")).tenant == "a"
    found = await store.tenants.find(key.digest)
    assert found is not None and found.keys_required and found.key is None
    with pytest.raises(NotFound):
        await store.tenants.revoke_key(key.id, by="you")
    last = (await store.tenants.audit())[0].fields
    assert (last["action"], last["id"], last["by"]) == ("revoke key", key.id, "you")


async def test_a_tenant_goes_with_its_keys_and_no_others(store: MetadataStore) -> None:
    await store.tenants.put([Tenant(name="a"), Tenant(name="a-b")], by="me")
    ours, other = [key_of("a", number) for number in (1, 2)], key_of("a-b", 3)
    for key in (*ours, other):
        await store.tenants.add_key(key, by="me")
    assert [key.id for key in (await store.tenants.page_of_keys("a", "", 10))[0]] == ["key-1", "key-2"]
    assert await store.tenants.delete("a", by="me") == 2
    for key in ours:
        found = await store.tenants.find(key.digest)
        assert found is not None and found.key is None
    left, more = await store.tenants.page_of_keys("", "", 10)
    assert ([key.id for key in left], more) == (["key-3"], "")


async def test_a_key_needs_a_tenant_and_a_tenant_has_so_many(store: MetadataStore) -> None:
    with pytest.raises(NotFound) as caught:
        await store.tenants.add_key(key_of("nobody"), by="me")
    assert caught.value.field == "tenant"
    for number in range(MAX_KEYS_PER_TENANT):
        await store.tenants.add_key(key_of("default", number), by="me")
    with pytest.raises(Conflict):
        await store.tenants.add_key(key_of("default", 99), by="me")


async def test_an_expired_key_is_told_from_none_for_a_day(store: MetadataStore, raw: Any) -> None:
    now_s = int(time.time())
    key = key_of("default", not_after_unix_s=now_s + 100)
    await store.tenants.add_key(key, by="me")
    ttl_s = raw.ttl(f"outrider:apikey:{key.digest.hex()}")
    assert 86_400 < ttl_s <= 86_500
    assert (is_expired(key, now_s + 99), is_expired(key, now_s + 100)) == (False, True)


async def test_without_the_store_reading_says_nothing_and_writing_is_refused(tmp_path: Any) -> None:
    async with MetadataStore.connect(f"unix://{tmp_path}/absent.sock") as store:
        assert await store.tenants.find(None) is None
        with pytest.raises(Unavailable):
            await store.tenants.put([Tenant(name="a")], by="me")


async def test_what_was_set_and_planned_goes_with_a_tenant(store: MetadataStore) -> None:
    await store.tenants.put([Tenant(name="a"), Tenant(name="ab")], by="me")
    off = tenants_pb2.SpeculationOverride(setting=tenants_pb2.SPECULATION_SETTING_OFF)
    decisions = [policy_pb2.TenantDecision(tenant=name, target="m") for name in ("a", "ab", "")]
    await store.plans.save(1, decisions)
    for name in ("a", "ab"):
        await store.plans.set_override(name, off)
    await store.tenants.delete("a", by="me")
    assert await store.plans.overrides() == {"ab": off}
    kept = await store.plans.load()
    assert kept is not None
    assert {one.tenant for one in kept} == {"ab", ""}
    assert await store.tenants.deleted() == {"a"}
    await store.tenants.forgotten(["a"])
    assert await store.tenants.deleted() == set()


async def test_speculation_is_set_only_for_tenants_that_are_defined_where_any_is(store: MetadataStore) -> None:
    on = tenants_pb2.SpeculationOverride(setting=tenants_pb2.SPECULATION_SETTING_ON)
    await store.plans.set_override("anybody", on)
    await store.tenants.put([Tenant(name="a")], by="me")
    await store.plans.set_override("a", on)
    await store.plans.set_override(DEFAULT_TENANT, on)
    for override in (on, None):
        with pytest.raises(NotFound, match="misspelt") as caught:
            await store.plans.set_override("misspelt", override)
        assert caught.value.field == "tenant"
    # Set while no tenant was defined.
    await store.plans.set_override("anybody", None)
    with pytest.raises(NotFound):
        await store.plans.set_override("anybody", on)
