"""Values of enums as people read them, also those of a later release."""

from __future__ import annotations

import pytest
from outrider.rpc.enums import value_name
from outrider.rpc.v1 import (
    control_pb2,
    drafts_pb2,
    policy_pb2,
    router_pb2,
    sequence_pb2,
    tenants_pb2,
    trace_pb2,
    worker_pb2,
)
from outrider_controller.cli.change.tenants import key_row, tenant_row
from outrider_controller.cli.drafts.versions import rollout_row
from outrider_controller.cli.show.trace.rows import event_row, trace_row
from outrider_controller.control.api.decisions import decision_row
from outrider_controller.control.api.rows import worker_row

LATER = 77


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        (worker_pb2.WorkerRole, worker_pb2.WORKER_ROLE_DRAFT, "draft"),
        (drafts_pb2.RolloutState, drafts_pb2.ROLLOUT_STATE_RUNNING, "running"),
        (router_pb2.SpeculationMode, 0, "unspecified"),
        (sequence_pb2.FinishReason, LATER, "77"),
    ],
)
def test_a_value_is_named_without_its_prefix(kind: type, value: int, name: str) -> None:
    assert value_name(kind.DESCRIPTOR, value) == name  # type: ignore[attr-defined]


def test_commands_show_what_a_later_release_answers() -> None:
    info = worker_pb2.WorkerInfo(role=LATER)  # type: ignore[arg-type]
    assert worker_row(control_pb2.WorkerStatus(info=info))["role"] == "77"
    assert decision_row(policy_pb2.TenantDecision(mode=LATER))["mode"] == "77"  # type: ignore[arg-type]
    assert rollout_row(drafts_pb2.Rollout(state=LATER))["state"] == "77"  # type: ignore[arg-type]
    assert key_row(tenants_pb2.ApiKey(scopes=[LATER]))["scopes"] == ["77"]  # type: ignore[list-item]
    assert tenant_row(tenants_pb2.Tenant(pacing=LATER))["pacing"] == "77"  # type: ignore[arg-type]
    assert event_row(trace_pb2.TraceEvent(kind=LATER, role=LATER))["event"] == "77"  # type: ignore[arg-type]
    assert trace_row(trace_pb2.RequestTrace(finish_reason=LATER))["state"] == "77"  # type: ignore[arg-type]
