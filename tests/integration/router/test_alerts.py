"""Alerts of the control plane that leads, from what routers tell it."""

from __future__ import annotations

import time

from outrider.rpc.v1 import policy_pb2
from outrider_controller.autoscaler.evidence import Evidence, EvidenceKey
from outrider_controller.control.alerts.report import AlertMetrics
from outrider_controller.plan_messages import evidence_to_proto
from prometheus_client import CollectorRegistry

from tests.integration.router.conftest import Fleet
from tests.planning import plan_leader

DRAFT = "simulated-draft@1/model"


async def test_what_routers_tell_becomes_an_event_and_a_metric_and_ends_with_the_leader(fleet: Fleet) -> None:
    now_s = [time.time()]
    registry = CollectorRegistry()
    labels = {"alert": "output_loops", "tenant": "acme", "model_name": "m"}
    seen = evidence_to_proto(
        EvidenceKey("acme", "m", DRAFT), Evidence(rounds=20, tokens=120, verified=100, accepted=100)
    )
    async with plan_leader(fleet.store, clock=lambda: now_s[0]) as leader:
        AlertMetrics(registry, lambda: leader.announcements.alerts.active)
        await leader.tick()
        follower = leader.follow()
        target = policy_pb2.TargetReport(model="m", drafts=[DRAFT], row_price=0.1, best_chance=0.9)
        for _ in range(12):
            leader.received(follower, policy_pb2.FollowRequest(router_id="r", evidence=[seen], targets=[target]))
            now_s[0] += 1.0
            await leader.tick()
        assert registry.get_sample_value("outrider_alert_active", labels) == 1
        await fleet.store.plans.lease("a").resign()
        await fleet.store.plans.lease("b").hold()
        await leader.tick()
        assert leader.epoch == 0
        assert registry.get_sample_value("outrider_alert_active", labels) is None
    event, ended = [event for event in await fleet.store.events() if event.kind.startswith("alert_")]
    assert (event.kind, ended.kind, ended.fields["tenant"]) == ("alert_raised", "alert_cleared", "acme")
    assert event.fields["reason"] == "1.000 of the last 1000 drafted tokens were accepted"
    assert (event.fields["tenant"], event.fields["model"]) == ("acme", "m")
