"""The controller as it is run: Ray, actors, and a request through a router actor's own port."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from outrider.errors import Code, OutriderError
from outrider.metadata import MetadataStore
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, router_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker

from tests.fakes import FakeDraft, FakeTarget, continuation, serving_draft, serving_target
from tests.integration.router.conftest import Fleet
from tests.route_call import RouteCall

# Each starts a Ray of its own. The stack of tests/e2e has one too.
pytestmark = pytest.mark.slow


def left_of(family: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(family, timeout=5)
    # Nobody may have waited yet for one whose parent is gone.
    return [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@asynccontextmanager
async def controller(url: str, ray_dir: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_controller", "--metadata", url, "--drain-timeout", "2"),
        *("--ray-temp-dir", str(ray_dir)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def until_logged(process: asyncio.subprocess.Process, text: str) -> dict[str, str]:
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode():
        if text in line:
            return dict(json.loads(line))
    raise AssertionError(f"ended before it said {text!r}")


async def address_of(process: asyncio.subprocess.Process, what: str) -> str:
    return (await until_logged(process, f'"{what} at '))["message"].split()[-1]


def children_named(pid: int, name: str) -> list[psutil.Process]:
    """Waits until there are some."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if found := [one for one in psutil.Process(pid).children() if one.name() == name]:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {name} was started")


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    """Short: sockets lie in it."""
    directory = Path(tempfile.mkdtemp(dir="/tmp")) / "ray"
    yield directory
    shutil.rmtree(directory.parent)


async def ask(stub: Any, request: Any, kill_after: int = 10**9, kill: Callable[[], object] = lambda: None) -> list[int]:
    """As a gateway does it: a call that breaks off is made again with the tokens already delivered."""
    tokens: list[int] = []
    while True:
        try:
            async for response in RouteCall(stub, request, 15):
                tokens.extend(response.token_ids)
                if len(tokens) >= kill_after:
                    kill_after = 10**9
                    kill()
            return tokens
        except OutriderError as error:
            assert error.code is Code.UNAVAILABLE
            request.resume_token_ids[:] = tokens


def listening_addresses(process: psutil.Process) -> set[str]:
    return {
        c.laddr.ip.removeprefix("::ffff:") for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }


async def test_router_actors_serve_come_back_on_their_port_and_leave_nothing_behind(
    metadata_url: str, fleet: Fleet, ray_dir: Path
) -> None:
    store = MetadataStore.connect(metadata_url)
    target, draft = FakeTarget(), FakeDraft()
    async with (
        store,
        serving_target(target),
        serving_draft(draft),
        store.register(target.info, target.address, lambda: target.load),
        store.register(draft.info, draft.address, lambda: draft.load),
        controller(metadata_url, ray_dir) as process,
    ):
        control_address = await address_of(process, "control plane")
        address = await address_of(process, "router")
        family = psutil.Process(process.pid).children(recursive=True)
        [raylet] = [one for one in family if one.name() == "raylet"]
        # Of both, when they have died at once, neither waits for the other.
        assert f"--maximum_startup_concurrency={min(2, os.cpu_count() or 1)}" in raylet.cmdline()
        async with create_channel(address) as channel, create_channel(control_address) as control_channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            request = fleet.request([5, 6], 50)
            async with asyncio.timeout(60):
                # The router may find the target before the draft.
                while not target.num_accepted:
                    assert await ask(stub, request) == continuation([5, 6], 50, 1000)

            control = control_pb2_grpc.ControlServiceStub(control_channel)
            listed = await control.ListWorkers(control_pb2.ListWorkersRequest())
            assert listed.metadata_available
            roles = sorted(w.info.role for w in listed.workers)
            assert roles == [1, 2, 3, 5]
            routers = await control.ListWorkers(control_pb2.ListWorkersRequest(role=worker.WORKER_ROLE_ROUTER))
            assert [w.address for w in routers.workers] == [address]

            assert set().union(*map(listening_addresses, family)) == {"127.0.0.1"}
            # Ray lets everybody write into its own directories: nobody else may get there.
            assert ray_dir.stat().st_mode & 0o777 == 0o700
            assert [path.stat().st_mode & 0o777 for path in ray_dir.iterdir()] == [0o700]
            router_process = psutil.Process(routers.workers[0].pid)
            assert await ask(stub, fleet.request([7], 400), 50, router_process.kill) == continuation([7], 400, 1000)
        async with asyncio.timeout(60):
            line = await until_logged(process, f"router at {address} died and was started again")
        assert line["component"] == "router" and line["worker"].startswith("router-")

        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        # Ray's essay about the death of an actor would be here.
        assert process.stdout is not None and await process.stdout.read() == b""
        assert not ray_dir.exists()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        # The killed router could not give its lease back; those that were stopped did.
        left = [r.pid for r in await store.workers() if r.info.role not in (1, 2)]
        assert set(left) <= {router_process.pid}


@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
async def test_a_controller_whose_ray_died_ends_with_all_that_it_started(
    metadata_url: str, ray_dir: Path, server: Any
) -> None:
    async with controller(metadata_url, ray_dir) as process:
        await address_of(process, "router")
        family = psutil.Process(process.pid).children(recursive=True)
        next(one for one in family if one.name() == server).kill()
        async with asyncio.timeout(60):
            await until_logged(process, f"Ray's {server} died")
            assert await process.wait() == 1
        assert left_of(family) == []
        assert list(ray_dir.iterdir()) == []


async def test_of_a_controller_that_is_killed_nothing_is_left(metadata_url: str, ray_dir: Path) -> None:
    async with controller(metadata_url, ray_dir) as process:
        await address_of(process, "router")
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        await process.wait()
        assert left_of(family) == []


async def test_a_controller_that_is_stopped_while_ray_starts_leaves_nothing_of_it(
    metadata_url: str, ray_dir: Path
) -> None:
    async with controller(metadata_url, ray_dir) as process:
        (raylet,) = await asyncio.to_thread(children_named, process.pid, "raylet")
        await asyncio.to_thread(children_named, raylet.pid, "ray::DashboardAgent")
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        async with asyncio.timeout(60):
            await process.wait()
        assert left_of(family) == []


async def test_a_gcs_that_dies_while_ray_starts_ends_the_controller_as_well(metadata_url: str, ray_dir: Path) -> None:
    async with controller(metadata_url, ray_dir) as process:
        (gcs,) = await asyncio.to_thread(children_named, process.pid, "gcs_server")
        # The controller has to have seen it, too.
        await asyncio.sleep(1)
        gcs.kill()
        async with asyncio.timeout(60):
            assert await process.wait() == 1
