"""What the control plane tells of workers wanted, from what routers say within a minute."""

from __future__ import annotations

import pytest
from outrider_controller.autoscaler.evidence import Evidence, EvidenceKey
from outrider_controller.control.plan.demand import EVERY_S, Demand
from prometheus_client import CollectorRegistry

KEY = EvidenceKey("t", "m", "d")


def wanted(registry: CollectorRegistry) -> tuple[float | None, float | None]:
    drafts = registry.get_sample_value("outrider_draft_workers_wanted", {"draft": "d"})
    return drafts, registry.get_sample_value("outrider_routers_wanted")


def minutes(demand: Demand, *, count: int, busy: float, late: float, routers: list[float]) -> None:
    """Of one draft worker that is so busy, in so many minutes."""
    for minute in range(count + 1):
        demand.look({"d": 1}, routers, minute * EVERY_S)
        demand.learn({KEY: Evidence(rounds=1000, late=1000 * late, draft_us=busy * EVERY_S * 1e6)})


def test_busy_drafts_and_routers_want_more_of_their_kind() -> None:
    registry = CollectorRegistry()
    minutes(Demand(registry), count=2, busy=1.3, late=0.0, routers=[0.9, 0.9])
    assert wanted(registry) == (2, 3)


def test_an_autoscaler_sees_how_busy_the_drafts_are_where_a_control_plane_leads() -> None:
    registry = CollectorRegistry()
    demand = Demand(registry)
    minutes(demand, count=2, busy=0.6, late=0.0, routers=[0.1])
    assert registry.get_sample_value("outrider_draft_pool_utilization", {"draft": "d"}) == pytest.approx(0.6)
    demand.stop()
    assert registry.get_sample_value("outrider_draft_pool_utilization", {"draft": "d"}) is None


def test_drafts_that_come_too_late_are_too_few_whatever_they_say_of_their_time() -> None:
    registry = CollectorRegistry()
    minutes(Demand(registry), count=2, busy=0.2, late=0.4, routers=[0.1])
    assert wanted(registry) == (2, 1)


def test_nothing_is_told_without_a_router() -> None:
    registry = CollectorRegistry()
    minutes(Demand(registry), count=3, busy=0.9, late=0.0, routers=[])
    assert wanted(registry)[0] is None


def test_routers_count_as_busy_as_they_were_over_the_minute_and_not_at_its_end() -> None:
    registry = CollectorRegistry()
    demand = Demand(registry)
    for second in range(0, 61, 10):
        demand.look({}, [0.1 if second == 60 else 1.0], float(second))
    assert wanted(registry)[1] == 2
