"""The plan, case by case: evidence, operators and load in; a mode and its reason out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from outrider_controller.autoscaler.estimator import SavingEstimator
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import (
    Decision,
    Mode,
    Plan,
    Reason,
    TargetState,
    TenantPolicy,
    TenantSetting,
    plan,
)

CELL = Cell("acme", "target")
FLEET = {"target": TargetState(frozenset({"a@1", "b@1"}))}


def learned(savings: Mapping[str, float], rounds: float = 2000) -> SavingEstimator:
    """What each draft version saves the tenant."""
    estimator = SavingEstimator()
    estimator.learn({EvidenceKey(*CELL, draft): noted(rounds, saving) for draft, saving in savings.items()})
    return estimator


def noted(rounds: float, saving: float) -> Evidence:
    return Evidence(rounds, 2 * rounds, saving * rounds, (saving**2 + 1) * rounds)


def decided(planned: Plan, cell: Cell = CELL) -> Decision:
    decision = planned.decision(cell)
    assert decision is not None
    return decision


@pytest.mark.parametrize(
    ("saving", "rounds", "mode", "reason"),
    [
        (0.5, 2000, Mode.ON, Reason.SAVES),
        (-0.5, 2000, Mode.TRY, Reason.COSTS),
        (0.02, 2000, Mode.ON, Reason.BETWEEN),
        (0.5, 10, Mode.ON, Reason.UNKNOWN),
        (-3.0, 49, Mode.TRY, Reason.UNKNOWN),
    ],
)
def test_what_is_known_of_a_tenant_decides_how_it_begins(
    saving: float, rounds: float, mode: Mode, reason: Reason
) -> None:
    decision = decided(plan(learned({"a@1": saving}, rounds), {}, FLEET, Plan(), 0.0))
    assert (decision.mode, decision.reason) == (mode, reason)


@pytest.mark.parametrize(
    ("first", "news", "then"),
    [(0.5, -0.5, Mode.TRY), (-0.5, 0.5, Mode.ON), (0.5, 0.03, Mode.ON), (0.5, -0.04, Mode.TRY), (-0.5, 0.08, Mode.TRY)],
)
def test_a_mode_is_left_only_when_the_saving_is_likely_on_the_other_side(first: float, news: float, then: Mode) -> None:
    estimator = learned({"a@1": first})
    planned = plan(estimator, {}, FLEET, Plan(), 0.0)
    for second in range(1, 30):
        estimator.learn({EvidenceKey(*CELL, "a@1"): noted(100, news)})
        planned = plan(estimator, {}, FLEET, planned, float(second))
    assert decided(planned).mode is then


def test_a_mode_holds_for_fifty_rounds() -> None:
    estimator = learned({"a@1": 0.5}, 100)
    planned = plan(estimator, {}, FLEET, Plan(), 0.0)
    estimator.learn({EvidenceKey(*CELL, "a@1"): noted(49, -5.0)})
    early = plan(estimator, {}, FLEET, planned, 1.0)
    assert (decided(early).mode, decided(early).reason) == (Mode.ON, Reason.DWELL)
    estimator.learn({EvidenceKey(*CELL, "a@1"): noted(5000, -0.5)})
    left = plan(estimator, {}, FLEET, early, 2.0)
    assert decided(left).mode is Mode.TRY
    # Time alone does not do: after the change nothing new is known.
    was = learned({"a@1": 0.5}, 2000)
    estimator.restore([(key, was.of(key)) for key in was.keys])
    estimator.learn({EvidenceKey(*CELL, "a@1"): noted(1, 0.5)})
    assert decided(plan(estimator, {}, FLEET, left, 60.0)).mode is Mode.TRY


def test_trials_cost_less_than_a_hundredth() -> None:
    for saving in (-0.1, -0.5, -1.5):
        decision = decided(plan(learned({"a@1": saving}, 20_000), {}, FLEET, Plan(), 0.0))
        tried = sum(share for _, share in decision.draft_shares)
        assert tried > 0
        # A round with the draft takes 2 - saving plain rounds for the 2 tokens that a plain decode takes 2 for.
        assert tried * -saving / 2 <= 0.0101


@pytest.mark.parametrize(
    ("setting", "saving", "mode", "reason"),
    [
        (TenantSetting.ON, -1.0, Mode.ON, Reason.OPERATOR_ON),
        (TenantSetting.OFF, 1.0, Mode.OFF, Reason.OPERATOR_OFF),
        (TenantSetting.AUTO, 1.0, Mode.ON, Reason.SAVES),
    ],
)
def test_operators_overrule_the_evidence_until_their_word_expires(
    setting: TenantSetting, saving: float, mode: Mode, reason: Reason
) -> None:
    estimator = learned({"a@1": saving})
    tenants = {"acme": TenantPolicy(setting, until_s=10.0, max_draft_tokens=3, weight=2.0)}
    planned = plan(estimator, tenants, FLEET, Plan(), 0.0)
    decision = decided(planned)
    assert (decision.mode, decision.reason) == (mode, reason)
    assert (decision.policy.max_draft_tokens, decision.policy.weight) == (3, 2.0)
    assert (sum(share for _, share in decision.draft_shares) > 0.99) == (mode is Mode.ON)
    estimator.learn({EvidenceKey(*CELL, "a@1"): noted(200, saving)})
    later = decided(plan(estimator, tenants, FLEET, planned, 10.0))
    assert later.mode is (Mode.ON if saving > 0 else Mode.TRY)


def test_an_operators_cap_gives_way_to_the_tenants_own_when_it_expires() -> None:
    estimator = learned({"a@1": 0.5})
    tenants = {"acme": TenantPolicy(until_s=10.0, override_draft_tokens=2, max_draft_tokens=4)}
    planned = plan(estimator, tenants, FLEET, Plan(), 0.0)
    assert decided(planned).policy.cap == 2
    later = plan(estimator, tenants, FLEET, planned, 10.0)
    assert [(cell, decision.policy.cap) for cell, decision in later.changed(planned)] == [(CELL, 4)]


def test_changes_of_mode_count_on_where_another_process_goes_on() -> None:
    estimator, planned, cells = learned({"a@1": 0.5}), Plan(), [CELL]
    for second in range(120):
        estimator.learn({EvidenceKey(*CELL, "a@1"): noted(300, -0.6 if second // 20 % 2 else 0.6)})
        planned = plan(estimator, {}, FLEET, planned, float(second))
    decisions = {cell: decided(planned, cell) for cell in cells}
    assert decisions[CELL].changes > 1
    resumed = plan(estimator, {}, FLEET, Plan.resumed(decisions, 120.0), 120.0)
    assert decided(resumed).changes == pytest.approx(decisions[CELL].changes)


def test_who_lost_its_draft_often_leaves_a_mode_as_soon_as_before() -> None:
    estimator, planned, now_s = learned({"a@1": 0.6}), Plan(), 0.0
    for second in range(12):
        now_s, drafts = float(second), frozenset({"a@1"} if second % 2 == 0 else ())
        planned = plan(estimator, {}, {"target": TargetState(drafts)}, planned, now_s)
    for second in range(12, 32):
        estimator.learn({EvidenceKey(*CELL, "a@1"): noted(60, -1.0)})
        planned = plan(estimator, {}, FLEET, planned, float(second))
    assert decided(planned).mode is Mode.TRY


def test_a_full_target_rests_its_drafts_and_wakes_them_at_half_the_price() -> None:
    estimator, modes = learned({"a@1": 0.5}), []
    planned = Plan()
    for second, price in enumerate((0.5, 1.0, 1.0, 1.0, 0.6, 0.4)):
        fleet = {"target": TargetState(frozenset({"a@1"}), price, best_chance=0.9)}
        planned = plan(estimator, {}, fleet, planned, float(second))
        modes.append((decided(planned).mode, decided(planned).reason is Reason.LOAD))
    on, off = (Mode.ON, False), (Mode.OFF, True)
    assert modes == [on, on, off, off, off, on]


def test_without_a_live_draft_nothing_is_drafted_whatever_an_operator_says() -> None:
    fleet = {"target": TargetState(frozenset({"other@1"}))}
    planned = plan(learned({"a@1": 1.0}), {"acme": TenantPolicy(TenantSetting.ON)}, fleet, Plan(), 0.0)
    assert decided(planned).reason is Reason.NO_DRAFT
    assert decided(planned).draft_for("any") is None


def test_most_requests_get_the_best_version_and_the_others_stay_known() -> None:
    decision = decided(plan(learned({"a@1": 0.9, "b@1": 0.4}), {}, FLEET, Plan(), 0.0))
    shares = dict(decision.draft_shares)
    assert shares["a@1"] > 0.9
    assert 0 < shares["b@1"] < 0.1
    drawn = Counter(decision.draft_for(f"request {n}") for n in range(20_000))
    assert drawn["b@1"] / 20_000 == pytest.approx(shares["b@1"], abs=0.005)
    assert drawn[None] == 0


def test_a_request_gets_the_same_draft_on_every_router() -> None:
    decision = decided(plan(learned({"a@1": 0.9, "b@1": 0.8}), {}, FLEET, Plan(), 0.0))
    assert [decision.draft_for(f"{n}") for n in range(50)] == [decision.draft_for(f"{n}") for n in range(50)]


def test_who_always_drafts_has_each_draft_as_often_as_those_who_draft_by_plan() -> None:
    decision = Decision(Mode.TRY, Reason.COSTS, draft_shares=(("a@1", 0.06), ("b@1", 0.02)))
    drawn = Counter(decision.draft_for(f"request {n}", always=True) for n in range(20_000))
    assert drawn["b@1"] / 20_000 == pytest.approx(0.25, abs=0.015)
    assert drawn["a@1"] + drawn["b@1"] == 20_000
    assert Decision(Mode.OFF, Reason.LOAD).draft_for("any", always=True) is None


def test_the_version_in_use_is_kept_until_another_is_clearly_better() -> None:
    estimator = learned({"a@1": 0.5, "b@1": 0.52})
    first = plan(estimator, {}, {"target": TargetState(frozenset({"a@1"}))}, Plan(), 0.0)
    both = plan(estimator, {}, FLEET, first, 1.0)
    assert dict(decided(both).draft_shares)["a@1"] > 0.5
    estimator.learn({EvidenceKey(*CELL, "b@1"): noted(3000, 1.2)})
    assert dict(decided(plan(estimator, {}, FLEET, both, 2.0)).draft_shares)["b@1"] > 0.5


def test_only_what_changed_is_told() -> None:
    estimator = learned({"a@1": 0.5})
    estimator.learn({EvidenceKey("other", "target", "a@1"): noted(2000, 0.5)})
    planned = plan(estimator, {}, FLEET, Plan(), 0.0)
    assert {cell.tenant for cell, _ in planned.changed(Plan())} == {"acme", "other"}
    same = plan(estimator, {}, FLEET, planned, 1.0)
    assert list(same.changed(planned)) == []
    forced = plan(estimator, {"acme": TenantPolicy(TenantSetting.OFF)}, FLEET, same, 2.0)
    assert [(cell.tenant, d.mode) for cell, d in forced.changed(same)] == [("acme", Mode.OFF)]
    estimator.learn({EvidenceKey("third", "target", "a@1"): noted(2000, 0.5)})
    grown = plan(estimator, {"acme": TenantPolicy(TenantSetting.OFF)}, FLEET, forced, 3.0)
    assert [cell.tenant for cell, _ in grown.changed(forced)] == ["third"]


def test_a_plan_goes_on_from_one_of_another_estimator() -> None:
    planned = plan(learned({"a@1": 0.5}), {}, FLEET, Plan(), 0.0)
    other = SavingEstimator()
    other.learn({EvidenceKey("first", "target", "a@1"): noted(100, 0.5), EvidenceKey(*CELL, "a@1"): noted(2040, -0.5)})
    assert decided(plan(other, {}, FLEET, planned, 1.0)).reason is Reason.DWELL


def test_who_was_never_seen_has_no_decision() -> None:
    assert plan(SavingEstimator(), {}, FLEET, Plan(), 0.0).decision(CELL) is None
