from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest
import redis
from outrider.metadata import MetadataStore
from outrider.prefix import block_hashes
from outrider.rpc.v1 import worker_pb2

from tests.integration.metadata.conftest import eventually, info

DRAFT, TARGET = worker_pb2.WORKER_ROLE_DRAFT, worker_pb2.WORKER_ROLE_TARGET
PROMPT = list(range(64))
HASHES = block_hashes(PROMPT, 16, b"tenant a")
WORKERS = ["t1", "t2", "t3", "d1"]


@pytest.fixture(autouse=True)
async def leases(store: MetadataStore) -> AsyncIterator[None]:
    async with (
        store.register(info("t1"), "127.0.0.1:7001", worker_pb2.WorkerLoad),
        store.register(info("t2"), "127.0.0.1:7002", worker_pb2.WorkerLoad),
        store.register(info("d1", DRAFT), "127.0.0.1:7003", worker_pb2.WorkerLoad),
    ):
        yield


async def test_a_lookup_counts_the_leading_blocks_each_worker_holds(
    store: MetadataStore, reader: MetadataStore
) -> None:
    await store.publish_prefix(TARGET, "t1", HASHES[:3])
    await store.publish_prefix(TARGET, "t2", HASHES[:1])
    await store.publish_prefix(DRAFT, "d1", HASHES)
    assert await reader.lookup_prefix(TARGET, HASHES, WORKERS) == {"t1": 3, "t2": 1}
    assert await reader.lookup_prefix(DRAFT, HASHES, WORKERS) == {"d1": 4}
    assert await reader.lookup_prefix(TARGET, HASHES[:2], WORKERS) == {"t1": 2, "t2": 1}
    assert await reader.lookup_prefix(TARGET, [], WORKERS) == {}


async def test_only_the_workers_named_are_looked_up(
    store: MetadataStore, reader: MetadataStore, raw: redis.Redis
) -> None:
    await store.publish_prefix(TARGET, "t1", HASHES[:3])
    await store.publish_prefix(TARGET, "t2", HASHES)
    assert await reader.lookup_prefix(TARGET, HASHES, ["t2"]) == {"t2": 4}
    assert await reader.lookup_prefix(TARGET, HASHES, ["t9"]) == {}
    # A lookup asks about these alone, so that it takes no longer in a larger fleet.
    before = raw.info("commandstats")["cmdstat_smismember"]["calls"]
    await reader.lookup_prefix(TARGET, HASHES, ["t1"])
    assert raw.info("commandstats")["cmdstat_smismember"]["calls"] == before + 1
    assert await reader.lookup_prefix(TARGET, HASHES, []) == {}


async def test_blocks_behind_a_hole_count_for_nothing(store: MetadataStore, reader: MetadataStore) -> None:
    await store.publish_prefix(TARGET, "t1", [HASHES[0], HASHES[2], HASHES[3]])
    await store.publish_prefix(TARGET, "t2", HASHES[1:])
    assert await reader.lookup_prefix(TARGET, HASHES, WORKERS) == {"t1": 1}


async def test_evicted_blocks_are_gone_and_can_come_back(store: MetadataStore, reader: MetadataStore) -> None:
    await store.publish_prefix(TARGET, "t1", HASHES)
    await store.publish_prefix(TARGET, "t1", [], HASHES[2:])
    assert await reader.lookup_prefix(TARGET, HASHES, WORKERS) == {"t1": 2}
    await store.publish_prefix(TARGET, "t1", HASHES[2:3])
    assert await reader.lookup_prefix(TARGET, HASHES, WORKERS) == {"t1": 3}


async def test_another_tenants_salt_finds_nothing(store: MetadataStore, reader: MetadataStore) -> None:
    await store.publish_prefix(TARGET, "t1", HASHES)
    assert await reader.lookup_prefix(TARGET, block_hashes(PROMPT, 16, b"tenant b"), WORKERS) == {}


async def test_a_worker_without_a_lease_is_not_found(
    store: MetadataStore, reader: MetadataStore, raw: redis.Redis
) -> None:
    await store.publish_prefix(TARGET, "t1", HASHES)
    raw.delete("outrider:lease:target:t1")
    assert await reader.lookup_prefix(TARGET, HASHES, WORKERS) == {}


async def test_the_index_ends_with_the_lease(store: MetadataStore, reader: MetadataStore, raw: redis.Redis) -> None:
    async with store.register(info("t3"), "127.0.0.1:7004", worker_pb2.WorkerLoad):
        await store.publish_prefix(TARGET, "t3", HASHES)
        assert 0 < raw.pttl("outrider:prefix:target:t3") <= 5000
    assert not raw.exists("outrider:prefix:target:t3")
    # A late word from a worker that has left changes nothing.
    await store.publish_prefix(TARGET, "t3", HASHES)
    assert await reader.lookup_prefix(TARGET, HASHES, WORKERS) == {}


async def test_a_large_cache_is_indexed_whole_and_again_after_it_was_lost(
    store: MetadataStore, reader: MetadataStore, raw: redis.Redis
) -> None:
    async def indexed_whole() -> bool:
        return bool(raw.scard("outrider:prefix:target:t1") == 8000)

    many = [hashlib.blake2b(i.to_bytes(4), digest_size=16).digest() for i in range(8000)]
    await store.publish_prefix(TARGET, "t1", many)
    assert await reader.lookup_prefix(TARGET, many[:3000], WORKERS) == {"t1": 3000}
    raw.delete("outrider:prefix:target:t1")
    await eventually(indexed_whole)


async def test_changes_made_at_once_end_in_the_state_of_the_last(store: MetadataStore, raw: redis.Redis) -> None:
    changes = []
    for i in range(100):
        on = i % 2 == 0
        changes.append(store.publish_prefix(TARGET, "t1", HASHES if on else [], [] if on else HASHES[1:]))
    await asyncio.gather(*changes)
    assert raw.smembers("outrider:prefix:target:t1") == {HASHES[0]}


async def test_what_is_no_block_hash_is_refused(store: MetadataStore) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        await store.publish_prefix(TARGET, "t1", [b"short"])


async def test_a_prefix_of_thousands_of_blocks_is_counted_to_its_first_gap(
    store: MetadataStore, reader: MetadataStore
) -> None:
    hashes = [i.to_bytes(16, "little") for i in range(2500)]
    await store.publish_prefix(TARGET, "t1", hashes[:1700] + hashes[1800:])
    await store.publish_prefix(TARGET, "t2", hashes)
    assert await reader.lookup_prefix(TARGET, hashes, WORKERS) == {"t1": 1700, "t2": 2500}
