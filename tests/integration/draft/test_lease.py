"""The worker's lease and prefix index on a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider.metadata import MetadataStore
from outrider.prefix import block_hashes
from outrider.rpc.v1 import draft_pb2, worker_pb2

from tests.redis_server import EmbeddedServer

from .conftest import Serve, until
from .test_service import opening, read

ROLE = worker_pb2.WORKER_ROLE_DRAFT


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedServer.start(tmp_path / "redis")
    yield server.url
    server.stop()


async def test_the_lease_names_the_worker_and_its_address_and_goes_with_it(served: Serve, url: str) -> None:
    async with MetadataStore.connect(url, call_timeout_s=2.0) as store:
        async with served(metadata_url=url) as (_, servicer):
            [record] = await store.workers(ROLE)
            assert record.info == servicer.info
            assert record.address.startswith("127.0.0.1:")
            assert record.load.num_free_blocks == 64
        assert await store.workers(ROLE) == []


async def test_prefixes_of_committed_text_are_published(served: Serve, url: str) -> None:
    prompt = [i % 300 for i in range(40)]
    async with (
        MetadataStore.connect(url, call_timeout_s=2.0) as store,
        served(metadata_url=url) as (stub, servicer),
    ):
        call = stub.Draft()
        await call.write(draft_pb2.DraftRequest(opens=[opening(1, prompt, cache_salt=b"tenant")]))
        await read(call)
        expected = {servicer.info.worker_id: 2}

        async def is_published() -> bool:
            return await store.lookup_prefix(ROLE, block_hashes(prompt, 16, b"tenant"), [*expected]) == expected

        await until(is_published)
        assert await store.lookup_prefix(ROLE, block_hashes(prompt, 16, b"another"), [*expected]) == {}
        call.cancel()


async def test_a_store_that_goes_away_is_no_reason_to_stop_drafting(served: Serve, tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path / "redis")
    async with served(metadata_url=server.url) as (stub, _):
        server.stop()
        call = stub.Draft()
        await call.write(draft_pb2.DraftRequest(opens=[opening(1, list(range(40)))]))
        [draft] = (await read(call)).drafts
        assert draft.parents[:4] == [-1, 0, 1, 2]
        call.cancel()
