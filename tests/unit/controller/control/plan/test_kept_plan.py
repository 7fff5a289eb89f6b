"""The plan in the metadata store, as a control plane that does not lead reads it for an explanation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from outrider.errors import Unavailable
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import policy_pb2 as policy
from outrider.rpc.v1 import worker_pb2 as worker
from outrider_controller.autoscaler.evidence import Cell, own_drafts_of
from outrider_controller.autoscaler.plan import Decision, Mode, Reason
from outrider_controller.control.plan.kept_plan import KeptPlan
from outrider_controller.plan_messages import decision_to_proto

from tests.fakes import fake_info


class Stored:
    """Leases and decisions; `away`: the store is unreachable."""

    def __init__(self, cells: Iterable[Cell], *, away: bool = False) -> None:
        decision = Decision(Mode.ON, Reason.SAVES, (("x", 1.0),))
        self._decisions = {cell: decision_to_proto(cell, decision, []) for cell in cells}
        self._away = away

    async def workers(self) -> list[LeaseRecord]:
        infos = [fake_info(worker.WORKER_ROLE_TARGET, model="m"), fake_info(worker.WORKER_ROLE_DRAFT, model="d")]
        return [LeaseRecord(info, worker.WorkerLoad(), "h:1", 1) for info in infos]

    async def find(self, tenant: str, targets: Iterable[str]) -> list[policy.TenantDecision] | None:
        wanted = {Cell(tenant, target) for target in targets}
        return None if self._away else [said for cell, said in self._decisions.items() if cell in wanted]


def kept(stored: Any) -> KeptPlan:
    return KeptPlan(stored, stored)


async def test_a_tenants_decisions_are_those_on_draft_workers_and_on_the_targets_own_drafts() -> None:
    mine = [Cell("acme", "m"), Cell("acme", own_drafts_of("m"))]
    others = [Cell("other", "m"), Cell("acme", "gone"), Cell("acme", "d"), Cell("acme", own_drafts_of("gone"))]
    found = await kept(Stored([*mine, *others])).find("acme")
    assert [Cell(one.tenant, one.target) for one in found] == mine


async def test_a_tenant_without_decisions_has_none() -> None:
    assert await kept(Stored([Cell("other", "m")])).find("acme") == []


async def test_while_the_store_is_away_that_is_said() -> None:
    with pytest.raises(Unavailable):
        await kept(Stored([], away=True)).find("acme")
