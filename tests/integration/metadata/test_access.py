"""Real servers that want a password, a certificate, or are found through Sentinels."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from outrider.metadata import MetadataStore
from outrider.metadata.connection.acl import KEYS, users
from outrider.metadata.connection.address import open_pool
from outrider.metadata.connection.embedded import find_server
from outrider.metadata.erasures import Order
from outrider.metadata.tenants.ledger import TenantUsage
from outrider.metadata.tenants.quota import QuotaRequest
from outrider.rpc.access.certificates import TlsFiles
from outrider.rpc.v1 import control_pb2, tenants_pb2, worker_pb2
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from tests.certificates import Cluster
from tests.integration.gateway.scripted_router import until
from tests.ports import free_port

PASSWORDS = {role: f"{role}-password" for role in KEYS}
ROLES = {role: worker_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}") for role in KEYS}


@contextmanager
def server(directory: Path, *arguments: str, port: int) -> Iterator[int]:
    """Of Redis, on this port."""
    directory.mkdir(parents=True, exist_ok=True)
    given = ("--dir", str(directory), "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning")
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([find_server(), *arguments, *given], stdout=log, stderr=log)
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A server with a user for each role; URLs by role, with passwords in files."""
    directory, port = tmp_path_factory.mktemp("acl"), free_port()
    (directory / "users.acl").write_text(users(PASSWORDS))
    for role, password in PASSWORDS.items():
        (directory / role).write_text(password + "\n")
    with server(directory, "--port", str(port), "--aclfile", str(directory / "users.acl"), port=port):
        yield lambda role: f"redis://{role}@127.0.0.1:{port}?password_file={directory / role}"


def info(role: str) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(worker_id=f"{role}-1", role=ROLES[role], protocol_version=1)


async def used_by_all(store: MetadataStore, role: str) -> None:
    await store.publish_prefix(ROLES[role], f"{role}-1", [b"h" * 16])
    await store.emit("worker_lost", {"worker_id": "x"})


async def used_by_target(store: MetadataStore) -> None:
    await store.workers(ROLES["draft"])
    await store.erasures.add_volume("volume-1", "here")
    await store.erasures.known([Order("t", True, 5)])
    assert [each.at_us for each in await store.erasures.orders()] == [5]


async def used_by_gateway(store: MetadataStore) -> None:
    await store.workers(ROLES["router"])
    await store.workers(ROLES["gateway"])
    await store.tenants.find(None)
    await store.tenants.find(b"d" * 32)
    await store.quotas.report_running("gateway-1", {"t": 1})
    wanted = QuotaRequest(rate=1.0, capacity=2.0, amount=1.0)
    assert await store.quotas.take("t", wanted, wanted, price=1.0, gateway="gateway-1", running=1, most_running=4)


async def used_by_router(store: MetadataStore) -> None:
    await store.workers()
    await store.lookup_prefix(ROLES["target"], [b"h" * 16], ["target-1"])
    await store.ledger.write(1, "router-1", {"t": TenantUsage()})


async def used_by_control(store: MetadataStore) -> None:
    await store.workers()
    await store.events()
    await store.tenants.put([tenants_pb2.Tenant(name="t")], by="test")
    await store.tenants.add_key(tenants_pb2.ApiKey(id="k", tenant="t", digest=b"d" * 32), by="test")
    await store.tenants.page("", 10)
    await store.tenants.page_of_keys("", "", 10)
    await store.tenants.audit()
    await store.tenants.revoke_key("k", by="test")
    await store.tenants.delete("t", by="test")
    await store.cordons.put(control_pb2.Cordon(worker_id="target-1", by="test"), "cordon worker")
    await store.cordons.remove("target-1", "test")
    order = await store.erasures.order("t", samples=True, by="test")
    await store.erasures.obeyed("volume-1", order)
    assert await store.erasures.who_obeyed() == {("volume-1", order.field): order.at_us}
    await store.erasures.volumes()
    await store.erasures.forget(["volume-1"])
    lease = store.plans.lease("control-1")
    epoch = await lease.hold()
    assert epoch is not None
    await store.plans.save(epoch, [])
    await store.plans.load()
    await store.plans.overrides()
    await store.plans.changed(0.01)
    assert await store.plans.changed(0.01) is not None
    await lease.resign()
    await store.ledger.read(0, 10)


USES: dict[str, Callable[[MetadataStore], Awaitable[None]]] = {
    "target": used_by_target,
    "gateway": used_by_gateway,
    "router": used_by_router,
    "control": used_by_control,
}


@pytest.mark.parametrize("role", KEYS)
async def test_each_roles_user_may_do_what_its_processes_do(guarded: Callable[[str], str], role: str) -> None:
    async with MetadataStore.connect(guarded(role), call_timeout_s=5.0) as store:
        async with store.register(info(role), "127.0.0.1:1", worker_pb2.WorkerLoad):
            await used_by_all(store, role)
            if role in USES:
                await USES[role](store)
        assert (store.available, store.counters.num_refused) == (True, 0)
        assert store.counters.num_dropped_events == 0


FORBIDDEN = {
    "draft": ["SET outrider:lease:target:t x", "SMEMBERS outrider:workers:target", "XRANGE outrider:events - +"],
    "target": ["SET outrider:lease:target-1 x", "GET outrider:apikey:d", "SET outrider:lease:gateway:g x"],
    "gateway": ["SET outrider:lease:target:t x", "HSET outrider:ledger:1:r t/n 5", "XRANGE outrider:audit - +"],
    "router": ["HSET outrider:tenant:t record x", "GET outrider:apikey:d", "HGETALL outrider:quota:t"],
    "control": ["GET another"],
}
FOR_NOBODY = ("KEYS *", "FLUSHALL", "CONFIG GET *", "ACL LIST", "SCRIPT FLUSH", "SHUTDOWN NOSAVE")


@pytest.mark.parametrize("role", KEYS)
async def test_each_roles_user_may_do_nothing_else(guarded: Callable[[str], str], role: str) -> None:
    async with Redis(connection_pool=open_pool(guarded(role), max_connections=2, settings={"protocol": 2})) as redis:
        for command in (*FORBIDDEN[role], *FOR_NOBODY):
            with pytest.raises(NoPermissionError):
                await redis.execute_command(*command.split())
        if role != "control":
            with pytest.raises(NoPermissionError):
                await redis.eval("return redis.call('HGETALL', KEYS[1])", 1, "outrider:plan")


async def test_without_a_password_nothing_is_read(guarded: Callable[[str], str]) -> None:
    url = guarded("draft").replace("draft@", "").partition("?")[0]
    async with MetadataStore.connect(url, call_timeout_s=5.0) as store:
        assert await store.workers() == []
        await until(lambda: not store.available)


def test_a_password_that_was_replaced_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("one\n")
    pool = open_pool(f"redis://u@h:1?password_file={tmp_path / 'password'}", max_connections=1, settings={})
    provider = pool.connection_kwargs["credential_provider"]
    assert provider.get_credentials() == ("u", "one")
    (tmp_path / "password").write_text("two\n")
    assert provider.get_credentials() == ("u", "two")
    assert "username" not in pool.connection_kwargs


async def test_a_server_with_tls_is_verified(tmp_path: Path) -> None:
    cluster, port = Cluster(tmp_path / "tls"), free_port()
    tls, strange = cluster.issue("redis", "127.0.0.1"), Cluster(tmp_path / "other").issue("redis", "127.0.0.1")
    with server(tmp_path / "redis", "--port", str(port), port=port):
        async with before(port, tls) as secure:
            for trusted, works in ((tls, True), (strange, False)):
                url = f"rediss://127.0.0.1:{secure}?ssl_ca_certs={trusted.authority}"
                async with MetadataStore.connect(url, call_timeout_s=5.0) as store:
                    await store.tenants.keep_required()
                    await until(lambda store=store, works=works: store.available is works)  # type: ignore[misc]
                    await store.tenants.keep_required()
                assert (await store.tenants.find(None) is not None) is works


@asynccontextmanager
async def before(port: int, tls: TlsFiles, renamed: tuple[int, int] = (0, 0)) -> AsyncIterator[int]:
    """A port with TLS before one without: the server at hand has none. Where it names the first of `renamed`, a port of
    as many digits, the client hears of the second."""
    old, new = (str(one).encode() for one in renamed)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer, old, new))

    listening = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=tls.public_context())
    async with listening:
        yield listening.sockets[0].getsockname()[1]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, old: bytes = b"", new: bytes = b"") -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            data = data.replace(old, new) if old != new else data
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://h:1",
        "nonsense",
        "redis://user:hunter2@h:port",
        "redis+sentinel://h:1",
        "redis+sentinel://h:x/main",
        "redis+sentinel:///main",
        "redis+sentinel://h:1/main/x",
        "redis+sentinel://h:1/main?foo=1",
        "redis+sentinel://h:1/main?sentinel_user=u",
        "redis://u:p@h:1?password_file=/f",
    ],
)
def test_a_url_that_is_none_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="metadata URL") as caught:
        MetadataStore.connect(url)
    assert url not in str(caught.value) and "hunter2" not in str(caught.value)


@contextmanager
def watched(directory: Path, *more: str) -> Iterator[tuple[int, ExitStack, str]]:
    """A leader, a follower and a Sentinel with `more` lines: the leader's port, what ends the leader, the URL."""
    with ExitStack() as stack:
        leader, follower, sentinel = (free_port() for _ in range(3))
        leads = stack.enter_context(ExitStack())
        leads.enter_context(server(directory / "leader", "--port", str(leader), port=leader))
        replica = ("--port", str(follower), "--replicaof", f"127.0.0.1 {leader}")
        stack.enter_context(server(directory / "follower", *replica, port=follower))
        configuration = directory / "sentinel.conf"
        configuration.write_text(
            f"port {sentinel}\nsentinel monitor main 127.0.0.1 {leader} 1\n"
            "sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 2000\n"
            + "".join(f"{line}\n" for line in more)
        )
        started = (str(configuration), "--sentinel")
        stack.enter_context(server(directory / "sentinel", *started, port=sentinel))
        yield leader, leads, f"redis+sentinel://127.0.0.1:{sentinel}/main"


async def test_the_leader_is_found_through_sentinels(tmp_path: Path) -> None:
    with watched(tmp_path) as (leader, _, url):
        async with MetadataStore.connect(url, call_timeout_s=5.0) as store:
            async with store.register(info("target"), "127.0.0.1:1", worker_pb2.WorkerLoad):
                assert [lease.info.worker_id for lease in await store.workers()] == ["target-1"]
            # More at once than there are connections.
            await asyncio.gather(*(store.tenants.find(None) for _ in range(50)))
            assert store.available
        async with Redis(port=leader, protocol=2) as redis:
            assert await redis.smembers("outrider:workers:target") == {b"target-1"}


@pytest.mark.parametrize("first", ["is away", "is silent"])
async def test_the_leader_is_found_though_the_first_sentinel(first: str, tmp_path: Path) -> None:
    with watched(tmp_path) as (_, _, url), socket.create_server(("127.0.0.1", 0)) as silent:
        port = free_port() if first == "is away" else silent.getsockname()[1]
        async with MetadataStore.connect(url.replace("//", f"//127.0.0.1:{port},")) as store:
            await store.tenants.keep_required()
            assert await store.tenants.find(None) is not None


async def test_sentinels_that_want_a_password_get_their_own(tmp_path: Path) -> None:
    file, wrong = tmp_path / "password", tmp_path / "wrong"
    file.write_text("of-sentinels\n")
    wrong.write_text("of-others")
    with watched(tmp_path, "user default off", "user asks on >of-sentinels allchannels +@all") as (_, _, url):
        for path, works in ((file, True), (wrong, False)):
            asked = f"{url}?sentinel_user=asks&sentinel_password_file={path}"
            async with MetadataStore.connect(asked, call_timeout_s=5.0) as store:
                await store.tenants.keep_required()
                assert (await store.tenants.find(None) is not None) is works


@pytest.mark.slow
async def test_sentinels_and_the_leader_are_asked_with_tls(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "tls")
    tls, strange = cluster.issue("redis", "127.0.0.1"), Cluster(tmp_path / "other").issue("redis", "127.0.0.1")
    with watched(tmp_path) as (leader, _, url):
        sentinel = int(url.rpartition(":")[2].partition("/")[0])
        async with before(leader, tls) as secure, before(sentinel, tls, (leader, secure)) as asked:
            for trusted, works in ((tls, True), (strange, False)):
                secured = f"rediss+sentinel://127.0.0.1:{asked}/main?ssl_ca_certs={trusted.authority}"
                async with MetadataStore.connect(secured, call_timeout_s=5.0) as store:
                    await store.tenants.keep_required()
                    await until(lambda store=store, works=works: store.available is works)  # type: ignore[misc]
                    await store.tenants.keep_required()
                assert (await store.tenants.find(None) is not None) is works


@pytest.mark.slow
async def test_a_follower_that_takes_over_is_found_without_a_restart(tmp_path: Path) -> None:
    with watched(tmp_path) as (_, leader, url):
        async with (
            MetadataStore.connect(url, call_timeout_s=5.0) as store,
            store.register(info("target"), "127.0.0.1:1", worker_pb2.WorkerLoad),
        ):
            # Until the Sentinel has heard of the follower.
            await asyncio.sleep(12)
            leader.close()
            await store.tenants.find(None)
            await until(lambda: not store.available)
            await until(lambda: store.available)
            # Leases are renewed there within a second.
            await asyncio.sleep(2.0)
            async with MetadataStore.connect(url, call_timeout_s=5.0) as other:
                assert [lease.info.worker_id for lease in await other.workers()] == ["target-1"]
