"""Absolute sums in a real server: written twice they count once."""

from __future__ import annotations

import pytest
import redis
from outrider.errors import Unavailable
from outrider.metadata import MetadataStore
from outrider.metadata.tenants.ledger import KEPT_HOURS, LedgerEntry, SourceSums, TenantUsage

from tests.redis_server import EmbeddedServer


async def test_a_write_that_is_done_again_changes_nothing(store: MetadataStore) -> None:
    for tokens in (5, 7, 7):
        assert await store.ledger.write(100, "r1", {"a": TenantUsage(output_tokens=tokens)})
    assert await store.ledger.read(100, 100) == [LedgerEntry(100, "a", TenantUsage(output_tokens=7))]


async def test_each_router_has_sums_of_its_own_and_a_tenants_name_may_hold_anything(store: MetadataStore) -> None:
    usage = TenantUsage(*range(1, 11), -11, sources={"ngram": SourceSums(5, 4, 3, 2, 1), 'a "b/c:d': SourceSums(1)})
    for writer in ("r1", "r2"):
        await store.ledger.write(100, writer, {"a": usage, "b/c:d": TenantUsage(requests=1)})
    found = await store.ledger.read(100, 100)
    assert sorted(entry.tenant for entry in found) == ["a", "a", "b/c:d", "b/c:d"]
    assert await store.ledger.read(100, 100, "a") == [LedgerEntry(100, "a", usage)] * 2


async def test_what_a_later_release_counts_too_is_passed_over(store: MetadataStore, raw: redis.Redis) -> None:
    await store.ledger.write(100, "r1", {"a": TenantUsage(requests=1)})
    raw.hset("outrider:ledger:100:r1", mapping={"a/sources": '{"ngram": [5, 4, 3, 2, 1, 9]}', "a/watts": "9"})
    usage = TenantUsage(requests=1, sources={"ngram": SourceSums(5, 4, 3, 2, 1)})
    assert await store.ledger.read(100, 100) == [LedgerEntry(100, "a", usage)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("a/requests", "many"),
        ("a/requests", str(1 << 64)),
        ("a/sources", "{"),
        ("a/sources", "[" * 100_000),
        ("a/sources", "[5]"),
        ("a/sources", '{"ngram": 5}'),
        ("a/sources", '{"ngram": [5, "4"]}'),
        ("a/sources", '{"ngram": [-5]}'),
        (b"\xff/requests", "1"),
    ],
)
async def test_a_damaged_field_is_left_out_by_its_name_and_the_rest_is_billed(
    store: MetadataStore, raw: redis.Redis, caplog: pytest.LogCaptureFixture, field: str | bytes, value: str
) -> None:
    usage = TenantUsage(prompt_tokens=3, output_tokens=2)
    await store.ledger.write(100, "r1", {"a": usage, "b": usage})
    raw.hset("outrider:ledger:100:r1", field, value)
    both = [LedgerEntry(100, "a", usage), LedgerEntry(100, "b", usage)]
    assert sorted(await store.ledger.read(100, 100), key=lambda entry: entry.tenant) == both
    key = field.encode() if isinstance(field, str) else field
    assert f"outrider:ledger:100:r1 {key!r}" in caplog.text
    assert await store.ledger.read(100, 100, "a") == both[:1]


async def test_hours_are_found_by_their_range_and_of_one_tenant_if_asked(store: MetadataStore) -> None:
    for hour in range(100, 105):
        await store.ledger.write(hour, "r1", {"a": TenantUsage(requests=hour), "b": TenantUsage(requests=1)})
    assert [entry.hour for entry in await store.ledger.read(101, 103, "a")] == [101, 102, 103]
    assert await store.ledger.read(101, 103, "nobody") == []


async def test_what_is_too_old_is_forgotten(store: MetadataStore, raw: redis.Redis) -> None:
    await store.ledger.write(100, "r1", {"a": TenantUsage(requests=1)})
    await store.ledger.write(100 + KEPT_HOURS, "r1", {"a": TenantUsage(requests=2)})
    assert [entry.hour for entry in await store.ledger.read(0, 100 + KEPT_HOURS)] == [100 + KEPT_HOURS]
    assert 0 < raw.ttl("outrider:ledger:100:r1") <= KEPT_HOURS * 3600


async def test_more_tenants_than_fit_a_call_are_written_and_read(store: MetadataStore) -> None:
    many = {f"t{number}": TenantUsage(requests=number) for number in range(2500)}
    assert await store.ledger.write(7, "r1", many)
    assert {entry.tenant: entry.usage.requests for entry in await store.ledger.read(7, 7)} == {
        name: usage.requests for name, usage in many.items()
    }


async def test_without_redis_a_write_says_no_and_a_question_says_why(
    store: MetadataStore, server: EmbeddedServer
) -> None:
    server.stop()
    assert not await store.ledger.write(7, "r1", {"a": TenantUsage(requests=1)})
    with pytest.raises(Unavailable):
        await store.ledger.read(7, 7)
