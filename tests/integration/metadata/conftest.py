"""A real server for every test, and stores on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis
from outrider.metadata import MetadataStore
from outrider.protocol.identity import SPOKEN
from outrider.rpc.v1 import worker_pb2

from tests.redis_server import EmbeddedServer

# What an answer says is tested on machines too busy to give it in 50 ms as well. Tests of the bound set their own.
PATIENT_S = 2.0


def info(worker_id: str = "t1", role: Any = worker_pb2.WORKER_ROLE_TARGET) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        protocol_version=SPOKEN.newest, worker_id=worker_id, role=role, model="m", vocab_size=384
    )


async def ids(store: MetadataStore) -> list[str]:
    return [lease.info.worker_id for lease in await store.workers()]


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> float:
    """Waits until the condition holds; returns how long that took, in seconds."""
    start_s = time.monotonic()
    while not await condition():
        assert time.monotonic() - start_s < timeout_s, f"not within {timeout_s} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - start_s


@pytest.fixture
def raw(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A plain client, to look and to do damage."""
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        yield client


@pytest.fixture
async def store(server: EmbeddedServer) -> AsyncIterator[MetadataStore]:
    """The one that registers."""
    async with MetadataStore.connect(server.url, call_timeout_s=PATIENT_S) as store:
        yield store


@pytest.fixture
async def reader(server: EmbeddedServer) -> AsyncIterator[MetadataStore]:
    """Another process's, as it were."""
    async with MetadataStore.connect(server.url, call_timeout_s=PATIENT_S) as store:
        yield store


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> float:
    """Leases of this process are renewed often, and end soon after the last time: their term in seconds."""
    term_s = 2.0
    monkeypatch.setattr("outrider.metadata.workers.lease.HEARTBEAT_S", 0.4)
    monkeypatch.setattr("outrider.metadata.workers.directory.LEASE_TTL_S", term_s)
    monkeypatch.setattr("outrider.metadata.store._TTL_MS", round(1000 * term_s))
    return term_s
