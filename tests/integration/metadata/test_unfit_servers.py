"""Servers that are no store as they are, all of them real: every process says why, and nobody is let in."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from outrider.metadata import MetadataStore
from outrider.metadata.connection.acl import users
from outrider.metadata.connection.link import RedisLink
from outrider.metadata.connection.timeouts import StoreCounters
from outrider.rpc.v1 import worker_pb2
from redis import Redis

from tests.certificates import Cluster
from tests.integration.gateway.scripted_router import until
from tests.integration.metadata.test_access import before, server
from tests.ports import free_port

Start = Callable[[Path], AbstractContextManager[str]]
"""Starts a server in a directory; its URL."""


@contextmanager
def redis_with(directory: Path, *arguments: str) -> Iterator[int]:
    port = free_port()
    with server(directory, "--port", str(port), *arguments, port=port):
        yield port


@contextmanager
def of_a_cluster(directory: Path, nodes: int) -> Iterator[str]:
    """All slots have a node; the URL is of the first, which has the last part of them."""
    with ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
        ports = [stack.enter_context(redis_with(directory / str(node), *options)) for node in range(nodes)]
        clients = [stack.enter_context(Redis(port=port)) for port in ports]
        for number, client in enumerate(reversed(clients)):
            first, last = 16384 * number // nodes, 16384 * (number + 1) // nodes - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0])
        yield f"redis://127.0.0.1:{ports[0]}"


@contextmanager
def sentinel(directory: Path) -> Iterator[str]:
    directory.mkdir(parents=True)
    port, configuration = free_port(), directory / "sentinel.conf"
    configuration.write_text(f"port {port}\n")
    with server(directory, str(configuration), "--sentinel", port=port):
        yield f"redis://127.0.0.1:{port}"


@contextmanager
def replica(directory: Path) -> Iterator[str]:
    with ExitStack() as stack:
        primary = stack.enter_context(redis_with(directory / "primary"))
        options = ("--replicaof", f"127.0.0.1 {primary}")
        yield f"redis://127.0.0.1:{stack.enter_context(redis_with(directory / 'replica', *options))}"


def redis_at(url: str, *arguments: str) -> Start:
    """One with these arguments and this URL."""

    @contextmanager
    def start(directory: Path) -> Iterator[str]:
        with redis_with(directory, *arguments) as port:
            yield url.format(port=port)

    return start


def with_user(name: str, rights: str) -> Start:
    """One that is asked as this user, whose password is its name."""

    @contextmanager
    def start(directory: Path) -> Iterator[str]:
        directory.mkdir(parents=True)
        (directory / "users.acl").write_text(users({}) + f"user {name} on >{name} {rights}\n")
        with redis_with(directory, "--aclfile", str(directory / "users.acl")) as port:
            yield f"redis://{name}:{name}@127.0.0.1:{port}"

    return start


_HERE = "redis://127.0.0.1:{port}"
UNFIT: dict[str, tuple[Start, str, bool]] = {
    "a cluster of one": (partial(of_a_cluster, nodes=1), "cluster mode", True),
    "a cluster of three": (partial(of_a_cluster, nodes=3), "cluster mode", True),
    "a Sentinel": (sentinel, "is a Sentinel", True),
    "a replica": (replica, "read-only replica", False),
    "no such database": (redis_at(f"{_HERE}/99"), "database", True),
    "a wrong password": (
        redis_at("redis://:wrong@127.0.0.1:{port}", "--requirepass", "right"),
        "refuses the user or the password",
        True,
    ),
    "no password": (redis_at(_HERE, "--requirepass", "right"), "wants a login", True),
    "no rights": (with_user("weak", "~* resetchannels -@all +ping +get"), "lacks rights", False),
    "rights to other keys": (with_user("other", "~other:* resetchannels +@all"), "lacks rights", False),
    "no TLS": (redis_at("rediss://127.0.0.1:{port}"), "speaks no TLS", False),
    "it evicts": (
        redis_at(_HERE, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"),
        "maxmemory-policy is allkeys-lru",
        False,
    ),
    "it is full": (redis_at(_HERE, "--maxmemory", "1"), "memory is full", False),
}
"""What it is → how to start it, what is said, and whether a program ends with that."""


@pytest.mark.parametrize("name", UNFIT)
async def test_what_is_wrong_with_a_server_is_said_in_words(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start, said, lasting = UNFIT[name]
    with start(tmp_path / "r") as url:
        async with MetadataStore.connect(url, call_timeout_s=2.0) as store:
            with caplog.at_level(logging.WARNING):
                problem = await store.problem()
                assert (problem is not None and said in problem) is lasting
                info = worker_pb2.WorkerInfo(worker_id="g-1", role=worker_pb2.WORKER_ROLE_GATEWAY, protocol_version=1)
                async with store.register(info, "127.0.0.1:1", worker_pb2.WorkerLoad):
                    found = await store.tenants.find(None)
                    await asyncio.sleep(0.2)
        # Nobody is let in where it cannot be known whether keys are required.
        assert found is None
        assert lasting or any(said in record.message for record in caplog.records)
        assert all("wrong" not in record.message and url not in record.message for record in caplog.records)


async def test_a_server_that_wants_tls_is_named_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls = Cluster(tmp_path / "tls").issue("redis", "127.0.0.1")
    with redis_with(tmp_path / "r") as port:
        async with before(port, tls) as secure, MetadataStore.connect(f"redis://127.0.0.1:{secure}") as store:
            with caplog.at_level(logging.WARNING):
                await store.problem()
    assert any("rediss://" in record.message for record in caplog.records)


async def test_a_server_that_has_answered_is_not_told_to_want_tls(caplog: pytest.LogCaptureFixture) -> None:
    answers = True

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answers and (asked := await reader.read(4096)):
            writer.write(b"+OK\r\n" * asked.count(b"*"))
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        link = RedisLink(f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}", StoreCounters())
        assert await link.call_in_background(lambda redis: redis.echo("")) is not None
        answers = False
        for _ in range(2):
            await link.call_in_background(lambda redis: redis.echo(""))
        await until(lambda: not link.available)
        await link.close()
    assert "TLS" not in caplog.text and "metadata store is away (it closes its connections)" in caplog.text


_PROGRAMS = {
    "gateway": ("outrider.gateway", "--listen-http", "127.0.0.1:0", "--listen-grpc", "127.0.0.1:0"),
    "target": ("outrider.target", "--listen", "127.0.0.1:0", "--model", "/nowhere"),
    "draft": ("outrider.draft", "--listen", "127.0.0.1:0", "--model", "/nowhere"),
    "router": ("outrider_controller.router",),
    "control": ("outrider_controller.control",),
    "controller": ("outrider_controller",),
    "outrider up": ("outrider_controller.cli", "up"),
}
_LASTING = [name for name, (_, _, lasting) in UNFIT.items() if lasting]


@pytest.mark.slow
@pytest.mark.parametrize("program", _PROGRAMS)
def test_every_program_ends_with_one_line_where_waiting_does_not_help(program: str, tmp_path: Path) -> None:
    """Prints how long each takes: python's start is most of it."""
    for name in _LASTING:
        start, said, _ = UNFIT[name]
        with start(tmp_path / name.replace(" ", "-")) as url:
            begun_s = time.monotonic()
            command = [sys.executable, "-m", *_PROGRAMS[program]]
            environment = {"OUTRIDER_METADATA": url, "OUTRIDER_UP_METADATA_URL": url, "HOME": str(tmp_path)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
            print(f"{program:14} {name:20} {time.monotonic() - begun_s:5.1f} s  {done.stderr.strip()[-110:]}")
        assert done.returncode == 1, done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr
