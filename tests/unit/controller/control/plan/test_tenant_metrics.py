"""What a dashboard sees of the plan."""

from __future__ import annotations

import pytest
from outrider_controller.autoscaler.evidence import Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import TargetState
from outrider_controller.autoscaler.planner import Planner
from outrider_controller.control.plan.demand import MAX_TENANTS, TenantMetrics
from prometheus_client import CollectorRegistry

FLEET = {"m": TargetState(price=0.1, drafts=frozenset({"d"}))}


def planned(*tenants: str, saved: float) -> Planner:
    planner = Planner()
    evidence = Evidence(rounds=1000, tokens=2000, saved=1000 * saved, saved_squared=1500, verified=4000, accepted=3000)
    for second in range(10):
        planner.learn({EvidenceKey(tenant, "m", "d"): evidence for tenant in tenants})
        planner.step({}, FLEET, float(second))
    return planner


def value(registry: CollectorRegistry, name: str, tenant: str = "acme") -> float | None:
    return registry.get_sample_value(f"outrider_speculation_{name}", {"tenant": tenant, "model_name": "m"})


def test_what_is_decided_for_a_tenant_can_be_seen() -> None:
    registry = CollectorRegistry()
    TenantMetrics(registry, lambda: planner)
    planner = planned("acme", saved=0.8)
    assert value(registry, "enabled") == 1
    assert value(registry, "saving") == pytest.approx(0.8, abs=0.05)
    assert value(registry, "price") == pytest.approx(0.1)
    assert value(registry, "acceptance") == pytest.approx(0.75)
    planner = planned("acme", saved=-0.8)
    assert value(registry, "enabled") == 0


def test_nothing_is_shown_where_another_control_plane_leads() -> None:
    registry = CollectorRegistry()
    TenantMetrics(registry, lambda: None)
    assert value(registry, "enabled") is None


def test_so_many_tenants_are_shown_and_no_more() -> None:
    registry = CollectorRegistry()
    names = [f"t{number}" for number in range(MAX_TENANTS + 5)]
    planner = planned(*names, saved=0.8)
    TenantMetrics(registry, lambda: planner)
    assert len([name for name in names if value(registry, "enabled", name) is not None]) == MAX_TENANTS
