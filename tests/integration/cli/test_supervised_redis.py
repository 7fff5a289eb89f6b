"""A Redis of our own that dies is started again where it was: those who live register again, the dead do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from outrider.metadata import MetadataStore
from outrider.metadata.connection.embedded import ServerCommand
from outrider.rpc.v1 import worker_pb2
from outrider_controller.cli.up.process import ManagedProcess, ProcessSpec
from outrider_controller.cli.up.supervisor import Supervisor

LIMIT_S = 15.0


@asynccontextmanager
async def supervised_redis(directory: Path) -> AsyncIterator[tuple[dict[str, ManagedProcess], str]]:
    """The processes, of which it is the only one, and its URL."""
    command = ServerCommand.prepare(directory)
    spec = ProcessSpec("redis", command.argv, command.url, answers=command.answers)
    processes: dict[str, ManagedProcess] = {}

    async def launch(name: str) -> ManagedProcess:
        process = processes[name] = ManagedProcess(spec, directory / "redis.log")
        await process.start()
        return process

    await (await launch("redis")).ready(LIMIT_S)
    task = asyncio.create_task(Supervisor(processes, launch, print, LIMIT_S).run())
    try:
        yield processes, command.url
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await processes["redis"].stop(1.0)
        command.remove_socket()


def worker(worker_id: str) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(worker_id=worker_id, role=worker_pb2.WORKER_ROLE_TARGET, model="m", vocab_size=384)


async def listed(store: MetadataStore, wanted: set[str]) -> None:
    """Returns once the store is there and lists exactly these."""
    end_s = time.monotonic() + LIMIT_S
    while not (store.available and {one.info.worker_id for one in await store.workers()} == wanted):
        assert time.monotonic() < end_s, f"{wanted} are not listed"
        await asyncio.sleep(0.05)


# Its time is that of a lease's term, after the outage.
@pytest.mark.slow
async def test_the_living_register_again_and_the_dead_vanish_with_their_lease(tmp_path: Path) -> None:
    async with (
        supervised_redis(tmp_path) as (processes, url),
        MetadataStore.connect(url) as store,
        MetadataStore.connect(url) as reader,
        MetadataStore.connect(url) as gone,
        store.register(worker("lives"), "127.0.0.1:1", worker_pb2.WorkerLoad),
    ):
        dead = gone.register(worker("dead"), "127.0.0.1:2", worker_pb2.WorkerLoad)
        await dead.__aenter__()
        await listed(reader, {"lives", "dead"})
        first = processes["redis"].pid
        processes["redis"].kill()
        # As a killed process: it gives nothing back.
        dead._task.cancel()
        await listed(reader, {"lives"})
        assert processes["redis"].pid != first
        # One that comes when the server has lost its memory is found as well.
        async with gone.register(worker("new"), "127.0.0.1:3", worker_pb2.WorkerLoad):
            await listed(reader, {"lives", "new"})
