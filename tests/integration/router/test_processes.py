"""Routers and control plane as processes of their own, started without Ray."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from outrider.metadata import MetadataStore
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, router_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker

from tests.fakes import FakeTarget, continuation, serving_target
from tests.integration.router.test_actors import until_logged
from tests.route_call import RouteCall


@asynccontextmanager
async def started(role: str, url: str, *arguments: str) -> AsyncIterator[Process]:
    """A process that ends with exit code 0 after SIGTERM."""
    command = (sys.executable, "-m", f"outrider_controller.{role}", "--metadata", url, *arguments)
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def address_of(process: Process) -> str:
    return (await until_logged(process, " listens on "))["message"].split()[-1]


async def test_a_router_and_a_control_plane_serve_without_ray_and_give_back_their_leases(
    metadata_url: str, fleet: Any
) -> None:
    target = FakeTarget()
    async with (
        MetadataStore.connect(metadata_url) as store,
        serving_target(target),
        store.register(target.info, target.address, lambda: target.load),
    ):
        async with (
            started("router", metadata_url, "--drain-timeout", "2") as router_process,
            started("control", metadata_url) as control_process,
        ):
            address, control_address = await asyncio.gather(address_of(router_process), address_of(control_process))
            async with create_channel(address) as channel, create_channel(control_address) as control_channel:
                stub = router_pb2_grpc.RouterServiceStub(channel)
                tokens: list[int] = []
                async for response in RouteCall(stub, fleet.request([5, 6], 20), 30):
                    tokens.extend(response.token_ids)
                assert tokens == continuation([5, 6], 20, 1000)
                control = control_pb2_grpc.ControlServiceStub(control_channel)
                listed = await control.ListWorkers(control_pb2.ListWorkersRequest())
                found = {one.pid: one.info.role for one in listed.workers}
                assert found[router_process.pid] == worker.WORKER_ROLE_ROUTER
                assert found[control_process.pid] == worker.WORKER_ROLE_CONTROL
        left = {record.pid for record in await store.workers()}
        assert not left & {router_process.pid, control_process.pid}


# It tries for a while: the process before it may still hold the port.
@pytest.mark.slow
async def test_a_port_that_is_taken_is_named(metadata_url: str) -> None:
    async with started("control", metadata_url, "--ops-listen", "") as first:
        address = await address_of(first)
        command = (sys.executable, "-m", "outrider_controller.control", "--metadata", metadata_url, "--listen", address)
        second = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
        _, said = await second.communicate()
        assert second.returncode == 1 and address in said.decode()
