"""What is asked of the metadata store to choose a worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import worker_pb2 as worker
from outrider_controller.router.requests.assignment import WorkerPicker

from tests.unit.router.made_requests import a_request
from tests.unit.router.speculation.test_settings import Router


class Directory:
    def __init__(self) -> None:
        self.asked: list[Collection[str]] = []

    async def lookup_prefix(self, role: int, hashes: Sequence[bytes], worker_ids: Collection[str]) -> dict[str, int]:
        self.asked.append(worker_ids)
        return {}


async def test_nobody_asks_what_full_workers_have_cached() -> None:
    """Each request that lacks a draft looks for one whenever any draft has room, also one of another model."""
    router, directory = Router(), Directory()
    target: Any = router.target()
    drafts = [router.draft(max_sequences=2, block_size=1) for _ in range(3)]
    unknown: Any = directory
    picker = WorkerPicker(router.fleet, unknown, 1.0)

    async def found(num_full: int) -> str | None:
        loads = [worker.WorkerLoad(num_running=2 * (number < num_full)) for number in range(len(drafts))]
        router.fleet.loads.report(
            [LeaseRecord(draft.info, load, "h:1", 1) for draft, load in zip(drafts, loads, strict=True)], ()
        )
        router.fleet.loads.count_elsewhere(drafts)
        draft = await picker.draft(target, a_request(), set(), {})
        return draft and draft.worker_id

    assert await found(num_full=3) is None
    assert await found(num_full=2) == drafts[2].worker_id
    assert directory.asked == []
    assert await found(num_full=1) in (drafts[1].worker_id, drafts[2].worker_id)
    assert [set(asked) for asked in directory.asked] == [{drafts[1].worker_id, drafts[2].worker_id}]
