"""Decisions, evidence and tenants' records as messages, and back."""

from __future__ import annotations

import pytest
from outrider.rpc.v1 import tenants_pb2 as tenants
from outrider_controller.autoscaler.evidence import Cell, EvidenceKey
from outrider_controller.autoscaler.plan import Decision, Mode, Reason, TenantPolicy, TenantSetting
from outrider_controller.autoscaler.planner import Planner
from outrider_controller.plan_messages import decision_from_proto, decision_to_proto, speculation_of, sums_from_proto

CELL = Cell("acme", "m")
KNOWN = [(EvidenceKey(*CELL, draft), [100.0, 200.0, 50.0, 80.0, 1.0, 300.0, 150.0, 900.0]) for draft in ("a@1", "b@1")]


@pytest.mark.parametrize(("weight", "worth"), [(0.0, 1.0), (0.1, 0.5), (1.5, 1.5), (100.0, 2.0)])
def test_a_saved_token_is_worth_as_much_as_its_tenants_weight_within_bounds(weight: float, worth: float) -> None:
    tenant = tenants.Tenant(name="acme", weight=weight, speculation=tenants.SpeculationPolicy(max_draft_tokens=3))
    said = speculation_of(tenant)
    assert said is not None
    assert (said.weight, said.max_draft_tokens) == (worth, 3)


def test_what_is_said_of_its_speculation_counts_for_more_than_its_weight() -> None:
    said = speculation_of(tenants.Tenant(name="acme", weight=2, speculation=tenants.SpeculationPolicy(weight=0.25)))
    assert said is not None
    assert said.weight == 0.25


def test_of_whom_nothing_is_said_is_as_everybody() -> None:
    assert speculation_of(tenants.Tenant(name="acme")) is None


def test_a_decision_is_the_same_after_its_way_as_a_message() -> None:
    policy = TenantPolicy(TenantSetting.OFF, 2e9, 2, max_draft_tokens=4, max_wait_us=3000, on_counts_as_auto=True)
    decision = Decision(
        mode=Mode.TRY,
        reason=Reason.COSTS,
        draft_shares=(("b@1", 0.25),),
        policy=policy,
        saving=-0.5,
        lower=-0.75,
        upper=-0.25,
        rounds=900,
        draft="b@1",
        changes=1.5,
        price=0.25,
    )
    message = decision_to_proto(CELL, decision, KNOWN)
    assert decision_from_proto(message) == (CELL, decision)
    # The receiver's clock may begin anywhere.
    assert decision_from_proto(message, clock_s=-40.0)[1].policy.until_s == 2e9 - 40
    assert sorted(sums_from_proto(message)) == KNOWN


def test_who_goes_on_from_a_plan_knows_of_every_draft_and_says_so_before_it_has_planned() -> None:
    decision = Decision(Mode.ON, Reason.SAVES, (("a@1", 1.0),), saving=0.5, rounds=900, draft="a@1")
    first, second = Planner(), Planner()
    first.estimator.restore(KNOWN)
    sent = decision_to_proto(CELL, decision, first.estimator.of_cell(CELL))
    second.resume(dict([decision_from_proto(sent)]), sums_from_proto(sent), 0.0)
    # One with news that it has not decided on yet is left for later.
    (resumed,) = second.decisions_of([CELL, Cell("new", "m")]).items()
    again = decision_to_proto(*resumed, second.estimator.of_cell(CELL))
    assert again == sent
    assert sorted(one.draft for one in (again.evidence, *again.other_evidence)) == ["a@1", "b@1"]
