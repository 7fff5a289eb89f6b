from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import redis
from outrider.metadata import MetadataStore
from outrider.rpc.v1 import control_pb2, worker_pb2

from tests.integration.metadata.conftest import eventually, ids, info
from tests.redis_server import EmbeddedServer

DRAFT, TARGET = worker_pb2.WORKER_ROLE_DRAFT, worker_pb2.WORKER_ROLE_TARGET


async def test_a_lease_tells_others_who_where_and_how_loaded(store: MetadataStore, reader: MetadataStore) -> None:
    load = worker_pb2.WorkerLoad(num_running=3, num_free_blocks=7)
    async with store.register(info("t1"), "127.0.0.1:7001", lambda: load):
        [lease] = await reader.workers(TARGET)
    assert (lease.info, lease.load) == (info("t1"), load)
    assert (lease.address, lease.pid) == ("127.0.0.1:7001", os.getpid())
    assert 0 <= lease.age_ms < 1000


async def test_a_server_slower_than_a_request_would_wait_is_told_of_a_worker_that_starts(
    server: EmbeddedServer, reader: MetadataStore
) -> None:
    async with MetadataStore.connect(server.url) as store:
        os.kill(server.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.3, os.kill, server.pid, signal.SIGCONT)
        async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
            assert await ids(reader) == ["t1"]


async def test_workers_can_be_asked_for_by_role(store: MetadataStore, reader: MetadataStore) -> None:
    async with (
        store.register(info("t1"), "127.0.0.1:7001", worker_pb2.WorkerLoad),
        store.register(info("d1", DRAFT), "127.0.0.1:7002", worker_pb2.WorkerLoad),
    ):
        assert [lease.info.worker_id for lease in await reader.workers(DRAFT)] == ["d1"]
        assert await ids(reader) == ["d1", "t1"]


async def test_a_lease_given_back_is_gone_at_once(store: MetadataStore, reader: MetadataStore) -> None:
    async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        assert await ids(reader) == ["t1"]
    assert await ids(reader) == []


@pytest.mark.parametrize(("heartbeat_s", "wake"), [(60.0, True), (0.1, False)], ids=["after wake", "by a heartbeat"])
async def test_a_changed_load_is_seen(
    store: MetadataStore,
    reader: MetadataStore,
    monkeypatch: pytest.MonkeyPatch,
    heartbeat_s: float,
    wake: bool,
) -> None:
    monkeypatch.setattr("outrider.metadata.workers.lease.HEARTBEAT_S", heartbeat_s)
    load = worker_pb2.WorkerLoad()

    async def seen() -> bool:
        return [lease.load for lease in await reader.workers()] == [load]

    async with store.register(info(), "127.0.0.1:7001", lambda: load) as lease:
        load.draining = True
        if wake:
            lease.wake()
        await eventually(seen)
        assert [lease.load.draining for lease in await reader.workers()] == [True]


@pytest.mark.usefixtures("short_leases")
async def test_a_load_that_cannot_be_told_does_not_cost_the_lease(store: MetadataStore, reader: MetadataStore) -> None:
    calls = 0

    def load() -> worker_pb2.WorkerLoad:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("busy")
        return worker_pb2.WorkerLoad(num_running=calls)

    async def renewed() -> bool:
        return (await reader.workers())[0].load.num_running == 3

    async with store.register(info(), "127.0.0.1:7001", load) as lease:
        lease.wake()
        await eventually(renewed)


CHILD = """
import asyncio, sys
from outrider.metadata import MetadataStore, store
from outrider.metadata.workers import lease
from outrider.rpc.v1 import worker_pb2

store._TTL_MS, lease.HEARTBEAT_S = round(1000 * float(sys.argv[2])), 0.4

async def main():
    async with MetadataStore.connect(sys.argv[1]) as store:
        info = worker_pb2.WorkerInfo(worker_id="child", role=worker_pb2.WORKER_ROLE_TARGET)
        async with store.register(info, "127.0.0.1:7001", worker_pb2.WorkerLoad):
            await store.publish_prefix(info.role, "child", [b"x" * 16])
            print("up", flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_killed_worker_vanishes_with_its_prefixes_when_its_term_is_over(
    server: EmbeddedServer, reader: MetadataStore, raw: redis.Redis, short_leases: float
) -> None:
    command = (sys.executable, "-c", CHILD, server.url, str(short_leases))
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert child.stdout is not None and await child.stdout.readline() == b"up\n"
    assert await ids(reader) == ["child"]
    assert await reader.lookup_prefix(TARGET, [b"x" * 16], ["child"]) == {"child": 1}
    child.kill()
    await child.wait()

    async def gone() -> bool:
        return await ids(reader) == []

    async def unmatched() -> bool:
        return await reader.lookup_prefix(TARGET, [b"x" * 16], ["child"]) == {}

    async def forgotten() -> bool:
        return [key for key in raw.scan_iter() if b"child" in key] == []

    assert await eventually(gone) > short_leases / 2
    # The reader ends the term by its own clock, some milliseconds before the store.
    await eventually(unmatched, 0.5)
    await eventually(forgotten, 1.5)
    # Who looks next forgets it.
    assert await ids(reader) == []
    assert raw.smembers("outrider:workers:target") == set()


async def test_a_malformed_lease_is_ignored_and_counted(
    store: MetadataStore, reader: MetadataStore, raw: redis.Redis
) -> None:
    def status(worker_id: str, address: str) -> bytes:
        return control_pb2.WorkerStatus(info=info(worker_id), address=address).SerializeToString()

    bad = {
        b"junk": b"\xff\xff\xff",
        b"other": status("t1", "127.0.0.1:7001"),
        b"nowhere": status("nowhere", ""),
        b"noport": status("noport", "127.0.0.1:http"),
        b"\xff\xfe": status("x", "127.0.0.1:7001"),
        b"x" * 500: b"",
    }
    for worker_id, value in bad.items():
        raw.sadd("outrider:workers:target", worker_id)
        raw.set(b"outrider:lease:target:" + worker_id, value, px=5000)
    async with store.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad):
        assert await ids(reader) == ["t1"]
    assert reader.counters.num_malformed == len(bad)
    assert reader.available


async def test_deployments_share_a_server_under_namespaces_of_their_own(server: EmbeddedServer) -> None:
    async with (
        MetadataStore.connect(server.url, namespace="a") as a,
        MetadataStore.connect(server.url, namespace="b") as b,
        a.register(info(), "127.0.0.1:7001", worker_pb2.WorkerLoad),
    ):
        await a.emit("fallback", {})
        assert (await ids(a), await ids(b)) == (["t1"], [])
        assert (len(await a.events()), len(await b.events())) == (1, 0)


@pytest.mark.parametrize(
    ("worker_id", "role", "address", "field"),
    [
        ("", TARGET, "127.0.0.1:7001", "worker_id"),
        ("a\nb", TARGET, "127.0.0.1:7001", "worker_id"),
        ("t1", worker_pb2.WORKER_ROLE_UNSPECIFIED, "127.0.0.1:7001", "role"),
        ("t1", 77, "127.0.0.1:7001", "role"),
        ("t1", TARGET, "127.0.0.1", "address"),
        ("t1", TARGET, "127.0.0.1:0", "address"),
    ],
)
async def test_a_lease_that_makes_no_sense_is_refused_by_field(
    store: MetadataStore, worker_id: str, role: int, address: str, field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        store.register(info(worker_id, role), address, worker_pb2.WorkerLoad)
