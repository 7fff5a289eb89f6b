"""The plan, repeated: what changes from one to the next, and what is told."""

from __future__ import annotations

import pytest
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import TargetState, TenantPolicy, TenantSetting
from outrider_controller.autoscaler.planner import Planner

OFF = {"t": TenantPolicy(TenantSetting.OFF)}


@pytest.mark.parametrize("drafts", [(), ("a@1", "b@1")])
def test_a_deleted_tenant_that_is_back_at_once_is_told_of_again(drafts: tuple[str, ...]) -> None:
    """Routers were told that it is gone, and would draft for it though its new record forbids that."""
    planner, cell, fleet = Planner(), Cell("t", "m"), {"m": TargetState(frozenset({"a@1"}))}
    planner.step({}, fleet, 0.0)
    for draft in drafts:
        planner.learn({EvidenceKey(*cell, draft): Evidence(60, 120, 30, 60)})
    assert cell in planner.step(OFF, fleet, 1.0)
    assert cell not in planner.step(OFF, fleet, 1.5)
    assert planner.forget({"t"}) == [cell]
    assert planner.step(OFF, fleet, 2.0)[cell].policy == OFF["t"]
