from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis
from outrider.metadata import MetadataStore
from outrider.metadata.connection.embedded import ServerCommand
from outrider.metadata.tenants.ledger import TenantUsage
from outrider.rpc.v1 import tenants_pb2

from tests.redis_server import EmbeddedServer

PARENT = """
import sys, time
from pathlib import Path
from tests.redis_server import EmbeddedServer
server = EmbeddedServer.start(Path(sys.argv[1]))
print(server.pid, flush=True)
time.sleep(60)
"""


def test_it_answers_on_a_private_socket_and_listens_on_no_port(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.config_get("port") == {"port": "0"}
        assert server.socket_path.stat().st_mode & 0o077 == 0
        assert psutil.Process(server.pid).net_connections("inet") == []


def test_stopping_leaves_neither_process_nor_socket(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path)
    assert psutil.pid_exists(server.pid)
    server.stop()
    server.stop()
    assert not psutil.pid_exists(server.pid)
    assert not server.socket_path.exists()


def test_a_hung_server_is_stopped_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.redis_server._STOP_TIMEOUT_S", 0.2)
    server = EmbeddedServer.start(tmp_path)
    psutil.Process(server.pid).suspend()
    server.stop()
    assert not psutil.pid_exists(server.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_it_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert server.is_running()
        parent.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_directory_too_deep_for_a_socket_gets_one_elsewhere(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / ("x" * 120)) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        elsewhere = server.socket_path.parent
        assert elsewhere.stat().st_mode & 0o077 == 0
    assert not elsewhere.exists()


def test_a_second_one_in_the_same_directory_is_refused_and_a_dead_ones_socket_is_no_obstacle(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        with pytest.raises(RuntimeError, match="already runs"):
            EmbeddedServer.start(tmp_path)
        psutil.Process(server.pid).kill()
        psutil.Process(server.pid).wait(60)
        with EmbeddedServer.start(tmp_path) as again, redis.Redis.from_url(again.url) as client:
            assert client.ping()


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    (tmp_path / "redis.sock").mkdir()
    with pytest.raises((RuntimeError, OSError), match=r"redis\.sock"):
        EmbeddedServer.start(tmp_path)


async def test_with_a_place_for_it_what_it_holds_is_there_again_after_a_restart(tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    held = {}
    for turn in range(2):
        command = ServerCommand.prepare(run, data)
        process = await asyncio.create_subprocess_exec(*command.argv, stdout=subprocess.DEVNULL)
        try:
            while not command.answers():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            async with MetadataStore.connect(command.url, call_timeout_s=5.0) as store:
                if not turn:
                    await store.tenants.put([tenants_pb2.Tenant(name="acme", weight=2)], by="test")
                    await store.ledger.write(7, "r1", {"acme": TenantUsage(requests=3)})
                held[turn] = (await store.tenants.get("acme")).weight, await store.ledger.read(7, 7)
        finally:
            process.kill()
            await process.wait()
            command.remove_socket()
    assert held[0] == held[1]
