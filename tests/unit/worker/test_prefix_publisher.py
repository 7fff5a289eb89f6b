"""What others hear of a prefix cache while the store is slow."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from outrider.metadata.store import MetadataStore
from outrider.rpc.v1 import worker_pb2
from outrider.worker.prefix_publisher import PrefixPublisher

INFO = worker_pb2.WorkerInfo(role=worker_pb2.WORKER_ROLE_DRAFT, worker_id="draft-1")


class SlowStore:
    def __init__(self) -> None:
        self.published: list[tuple[int, str, list[bytes], list[bytes]]] = []
        self.answers = asyncio.Semaphore(0)

    async def publish_prefix(self, *what: Any) -> None:
        self.published.append(what)
        await self.answers.acquire()


async def until(store: SlowStore, count: int) -> None:
    async with asyncio.timeout(60):
        while len(store.published) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_changes_meanwhile_are_told_at_once_and_only_the_last_of_each_block() -> None:
    store = SlowStore()
    async with PrefixPublisher(cast(MetadataStore, store), INFO) as publisher:
        publisher.note([b"a"], [])
        await until(store, 1)
        for _ in range(1000):
            publisher.note([b"b", b"c"], [b"a"])
            publisher.note([b"a"], [b"b"])
        store.answers.release()
        await until(store, 2)
    role = worker_pb2.WORKER_ROLE_DRAFT
    assert store.published == [(role, "draft-1", [b"a"], []), (role, "draft-1", [b"c", b"a"], [b"b"])]


async def test_without_a_store_nothing_is_kept() -> None:
    async with PrefixPublisher(None, INFO) as publisher:
        publisher.note([b"a"], [b"b"])
        assert not publisher._changes
