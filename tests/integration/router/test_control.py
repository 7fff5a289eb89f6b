"""The operator's API, from real leases."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from outrider.metadata import MetadataStore
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2
from outrider.rpc.v1 import worker_pb2 as worker

from tests.integration.router.conftest import Fleet, control_plane


async def test_workers_are_listed_by_role_with_their_load(fleet: Fleet) -> None:
    target, draft = await fleet.target(), await fleet.draft()
    async with control_plane(fleet) as stub:
        everyone = await stub.ListWorkers(control_pb2.ListWorkersRequest())
        assert everyone.metadata_available
        ids = {w.info.worker_id for w in everyone.workers}
        assert {target.info.worker_id, draft.info.worker_id} < ids and len(ids) == 3
        drafts = await stub.ListWorkers(control_pb2.ListWorkersRequest(role=worker.WORKER_ROLE_DRAFT))
        assert [(w.info, w.address) for w in drafts.workers] == [(draft.info, draft.address)]
        assert drafts.workers[0].pid > 0 and drafts.workers[0].age_ms < 2000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListWorkers(control_pb2.ListWorkersRequest(role=99))
        assert from_rpc_error(caught.value).field == "role"


async def test_without_the_store_the_list_says_that_it_is_old(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(MetadataStore.connect(f"unix://{tmp_path}/absent.sock"))
        stub = await stack.enter_async_context(control_plane(Fleet(store, stack)))
        answer = await stub.ListWorkers(control_pb2.ListWorkersRequest())
    assert not answer.metadata_available
    assert list(answer.workers) == []
