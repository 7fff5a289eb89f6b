"""Redis is killed, hung, emptied, misused: callers see less, never an error, and never wait long."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from outrider.metadata import MetadataStore
from outrider.metadata.connection.timeouts import BACKGROUND_TIMEOUT_S
from outrider.rpc.v1 import worker_pb2

from tests.integration.metadata.conftest import eventually, ids, info
from tests.redis_server import EmbeddedServer

TARGET = worker_pb2.WORKER_ROLE_TARGET
HASHES = [bytes([i]) * 16 for i in range(4)]

# 50 ms, and what the scheduler of a busy machine may add; well under what background work waits.
# Of what would last for ever, on a machine with other work.
BOUND_S = 5.0


async def has(store: MetadataStore, expected: list[str]) -> bool:
    return await ids(store) == expected


async def longest_call_s(store: MetadataStore) -> float:
    """Every operation once."""
    longest_s = 0.0
    for call in (
        lambda: store.workers(),
        lambda: store.lookup_prefix(TARGET, HASHES, ["t1"]),
        lambda: store.publish_prefix(TARGET, "other", HASHES),
        lambda: store.emit("fallback", {"reason": "test"}),
        lambda: store.events(),
    ):
        start_s = time.monotonic()
        await call()
        longest_s = max(longest_s, time.monotonic() - start_s)
    return longest_s


async def test_a_killed_server_costs_quality_and_all_comes_back_by_itself(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path)
    async with (
        MetadataStore.connect(server.url) as store,
        MetadataStore.connect(server.url) as reader,
        store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad),
    ):
        await store.publish_prefix(TARGET, "t1", HASHES[:2])
        await eventually(lambda: has(reader, ["t1"]))
        os.kill(server.pid, signal.SIGKILL)
        server.stop()

        assert await longest_call_s(reader) < BOUND_S
        assert await ids(reader) == ["t1"]
        assert await reader.lookup_prefix(TARGET, HASHES, ["t1"]) == {}
        assert await reader.events() == []
        assert reader.counters.num_dropped_events == 1
        await store.publish_prefix(TARGET, "t1", HASHES[2:3], HASHES[:0])
        await eventually(lambda: is_available(reader, False))

        with EmbeddedServer.start(tmp_path) as again:
            assert again.url == server.url

            async def whole() -> bool:
                assert await ids(reader) == ["t1"]
                return await reader.lookup_prefix(TARGET, HASHES, ["t1"]) == {"t1": 3}

            await eventually(whole)
            assert reader.available and store.available
            assert reader.counters.num_outages >= 1


async def is_available(store: MetadataStore, expected: bool) -> bool:
    await store.workers()
    return store.available is expected


async def test_a_hung_server_costs_one_bounded_wait_and_then_none(server: EmbeddedServer, store: MetadataStore) -> None:
    async with (
        MetadataStore.connect(server.url) as reader,
        store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad),
    ):
        await eventually(lambda: has(reader, ["t1"]))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            start_s = time.monotonic()
            assert await reader.lookup_prefix(TARGET, HASHES, ["t1"]) == {}
            assert time.monotonic() - start_s < BOUND_S
            # Nobody waits for the others: one of them may take as long as a far server would.
            assert await longest_call_s(reader) < BACKGROUND_TIMEOUT_S + BOUND_S
            start_s = time.monotonic()
            for _ in range(1000):
                assert await ids(reader) == ["t1"]
            # At a second each they would take a quarter of an hour.
            assert time.monotonic() - start_s < 100
            await eventually(lambda: is_available(reader, False))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await eventually(lambda: is_available(reader, True))
        assert await ids(reader) == ["t1"]


async def test_a_process_may_start_before_its_server(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'redis.sock'}"
    async with MetadataStore.connect(url) as store, store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        assert await ids(store) == []
        await store.publish_prefix(TARGET, "t1", HASHES)
        with EmbeddedServer.start(tmp_path) as server:
            assert server.url == url

            async def there() -> bool:
                return await ids(store) == ["t1"] and await store.lookup_prefix(TARGET, HASHES, ["t1"]) == {"t1": 4}

            await eventually(there)


async def test_a_server_that_lost_its_data_does_not_make_workers_vanish(
    store: MetadataStore, reader: MetadataStore, raw: redis.Redis
) -> None:
    async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        await store.publish_prefix(TARGET, "t1", HASHES)
        assert await ids(reader) == ["t1"]
        raw.flushall()

        async def restored() -> bool:
            assert await ids(reader) == ["t1"]
            return await reader.lookup_prefix(TARGET, HASHES, ["t1"]) == {"t1": 4}

        await eventually(restored)


async def test_keys_of_another_type_are_refusals_not_an_outage(store: MetadataStore, raw: redis.Redis) -> None:
    for key in ("outrider:workers:target", "outrider:events", "outrider:prefix:target:t1"):
        raw.set(key, "mine")
    async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        await store.publish_prefix(TARGET, "t1", HASHES)
        assert await ids(store) == []
        assert await store.lookup_prefix(TARGET, HASHES, ["t1"]) == {}
        await store.emit("fallback", {})
        assert await store.events() == []
        await asyncio.sleep(0.2)
        refused = store.counters.num_refused
        assert 5 <= refused < 10
    assert store.available


async def test_a_server_out_of_memory_is_a_refusal(store: MetadataStore, raw: redis.Redis) -> None:
    raw.config_set("maxmemory", "1")
    async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        assert await ids(store) == []
    assert store.available
    assert store.counters.num_refused > 0


async def test_workers_stay_while_a_server_is_out_of_memory(store: MetadataStore, raw: redis.Redis) -> None:
    async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        raw.config_set("maxmemory", "1")
        raw.pexpire("outrider:lease:target:t1", 3000)

        async def renewed() -> bool:
            assert await ids(store) == ["t1"]
            return raw.pttl("outrider:lease:target:t1") > 3000

        await eventually(renewed)


async def test_writes_go_to_the_new_primary_behind_the_same_address(tmp_path: Path) -> None:
    """A Service or a DNS name leads new connections to the new primary; the old ones stay open."""
    address = tmp_path / "primary"
    with EmbeddedServer.start(tmp_path / "a") as old, EmbeddedServer.start(tmp_path / "b") as new:
        address.symlink_to(old.socket_path)
        # On a machine with other work too, no call is given up.
        async with MetadataStore.connect(f"unix://{address}", call_timeout_s=60.0) as store:
            await asyncio.gather(*(store.emit("fallback", {"reason": "before"}) for _ in range(20)))
            with redis.Redis(unix_socket_path=str(old.socket_path)) as raw:
                raw.replicaof("127.0.0.1", "1")
            address.unlink()
            address.symlink_to(new.socket_path)
            await asyncio.gather(*(store.emit("fallback", {"reason": "after"}) for _ in range(20)))
        async with MetadataStore.connect(new.url) as reader:
            assert len(await reader.events()) == 20


async def test_a_burst_of_calls_is_answered_whole(store: MetadataStore, reader: MetadataStore) -> None:
    async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        await store.publish_prefix(TARGET, "t1", HASHES)
        answers = await asyncio.gather(*(reader.lookup_prefix(TARGET, HASHES, ["t1"]) for _ in range(200)))
    assert answers == [{"t1": 4}] * 200


async def test_a_cancelled_caller_leaves_the_store_in_order(store: MetadataStore) -> None:
    async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        for i in range(70):
            task = asyncio.create_task(store.workers())
            for _ in range(i % 7):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await ids(store) == ["t1"]
    assert store.available


async def test_nothing_is_left_running_when_a_store_is_closed_while_its_server_is_away(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with MetadataStore.connect(f"unix://{tmp_path / 'none.sock'}") as store:
        await store.workers()
        assert asyncio.all_tasks() > before
    assert asyncio.all_tasks() == before


class Refusing:
    """A client whose PING fails some times as no client should."""

    def __init__(self, client: Any, times: int) -> None:
        self._client = client
        self._times = times

    async def ping(self) -> None:
        if self._times:
            self._times -= 1
            raise LookupError("a bug")
        await self._client.ping()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


async def test_what_nobody_foresaw_is_an_outage_and_ends_like_one(server: EmbeddedServer) -> None:
    """An exception of any kind, in a call or where the store is asked for: later calls are answered again."""

    async def fail(client: Any) -> None:
        raise LookupError("a bug")

    async with (
        MetadataStore.connect(server.url) as store,
        store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad),
    ):
        link: Any = store._link
        link._redis = Refusing(link._redis, times=2)
        assert await link.call(fail) is None
        assert await ids(store) == []
        await eventually(lambda: has(store, ["t1"]))


async def test_what_says_ok_to_everything_is_no_store(tmp_path: Path) -> None:
    async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(b"+OK\r\n" * (b"\r\n" + data).count(b"\r\n*"))
            await writer.drain()
        writer.close()

    path = tmp_path / "redis.sock"
    async with (
        await asyncio.start_unix_server(agree, path),
        MetadataStore.connect(f"unix://{path}") as store,
        store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad),
    ):
        assert await ids(store) == []
        assert await store.lookup_prefix(TARGET, HASHES, ["t1"]) == {}
        assert await store.events() == []
