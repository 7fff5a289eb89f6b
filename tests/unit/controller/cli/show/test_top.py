"""outrider top: what the plan says of a tenant's drafts, a line for each of the two kinds."""

from __future__ import annotations

from outrider.rpc.v1 import control_pb2, policy_pb2, trace_pb2, worker_pb2
from outrider_controller.autoscaler.evidence import own_drafts_of
from outrider_controller.cli.show.top import LoadSample, page


def decision(target: str, saving: float) -> policy_pb2.TenantDecision:
    evidence = policy_pb2.DraftEvidence(rounds=100, tokens=250)
    spread = {"lower": saving - 0.1, "upper": saving + 0.1}
    return policy_pb2.TenantDecision(
        target=target, mode=policy_pb2.PLAN_MODE_ON, saving=saving, evidence=evidence, rounds=100, **spread
    )


def test_a_tenant_has_a_line_for_drafts_of_workers_and_one_for_the_targets_own() -> None:
    busy, idle = (trace_pb2.Activity(tenant=name, num_running=1) for name in ("acme", "idle"))
    decisions = {"acme": [decision("m", 0.4), decision(own_drafts_of("m"), 0.9)]}
    sample = LoadSample(0.0, [], {("acme", ""): busy, ("idle", ""): idle}, [], decisions)
    lines = [" ".join(line.split()) for line in page(sample, sample)]
    assert "acme 1 0 0 0 - draft on 1.19 (1.14 to 1.25) -" in lines
    assert "acme 1 0 0 0 - target on 1.56 (1.47 to 1.67) -" in lines
    assert "idle 1 0 0 0 - - - - -" in lines


def test_one_is_not_told_as_several() -> None:
    target = control_pb2.WorkerStatus(info=worker_pb2.WorkerInfo(worker_id="t", role=worker_pb2.WORKER_ROLE_TARGET))
    busy = {("acme", ""): trace_pb2.Activity(tenant="acme", num_running=1)}
    sample = LoadSample(0.0, [target], busy, [], {})
    assert page(sample, sample)[0].endswith("  1 request under way, 1 worker")
