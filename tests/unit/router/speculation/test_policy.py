"""What a request may have: the least of what its client, operators and the plan allow."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.metadata.leader import LEADER_GONE_S
from outrider.protocol.rounds import Round
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider_controller.autoscaler.evidence import Cell, EvidenceKey, own_drafts_of
from outrider_controller.autoscaler.plan import Decision, Mode, Reason, TargetState, TenantPolicy, TenantSetting
from outrider_controller.autoscaler.planner import ANYBODY, Planner
from outrider_controller.plan_messages import draft_version
from outrider_controller.router.config import PolicyConfig
from outrider_controller.router.speculation.policy import Policy

from tests.unit.router.made_requests import a_request

DRAFT = worker.WorkerInfo(model="d", model_revision="1", draft_kind="model")
VERSION = draft_version(DRAFT)
FLEET = {"m": TargetState(frozenset({VERSION}))}
ALL = ((VERSION, 1.0),)
AUTO, ON, OFF = router.SPECULATION_MODE_AUTO, router.SPECULATION_MODE_ON, router.SPECULATION_MODE_OFF


def deciding(decision: Decision, **config: int) -> Policy:
    """For the tenant of requests here."""
    return Policy(PolicyConfig(**config), decisions={Cell("t", "m"): decision})


COSTS = Decision(Mode.TRY, Reason.COSTS, ((VERSION, 0.0),))
FORBIDDEN = Decision(Mode.OFF, Reason.OPERATOR_OFF, (), TenantPolicy(TenantSetting.OFF))
AT_MOST_TWO = Decision(Mode.ON, Reason.OPERATOR_ON, ALL, TenantPolicy(TenantSetting.ON, max_draft_tokens=2))


@pytest.mark.parametrize(
    ("client", "decision", "tokens", "always", "own"),
    [
        (AUTO, Decision(Mode.ON, Reason.SAVES, ALL), 5, False, MAX_DRAFT_TOKENS),
        (OFF, Decision(Mode.ON, Reason.SAVES, ALL), 0, False, 0),
        (OFF, Decision(Mode.ON, Reason.OPERATOR_ON, ALL, TenantPolicy(TenantSetting.ON)), 0, True, 0),
        # What a draft worker saves or costs says nothing of what the target looks up.
        (AUTO, COSTS, 0, False, MAX_DRAFT_TOKENS),
        (ON, COSTS, 5, True, MAX_DRAFT_TOKENS),
        (ON, Decision(Mode.TRY, Reason.COSTS, (), TenantPolicy(on_counts_as_auto=True)), 0, False, MAX_DRAFT_TOKENS),
        (AUTO, Decision(Mode.OFF, Reason.LOAD), 0, False, MAX_DRAFT_TOKENS),
        (ON, FORBIDDEN, 0, False, 0),
        (AUTO, AT_MOST_TWO, 2, True, 2),
        # A draft may have come since: what is expected of it counts.
        (AUTO, Decision(Mode.OFF, Reason.NO_DRAFT, saving=0.3), 5, False, MAX_DRAFT_TOKENS),
        (AUTO, Decision(Mode.OFF, Reason.NO_DRAFT, saving=-0.3), 0, False, MAX_DRAFT_TOKENS),
        (AUTO, Decision(Mode.OFF, Reason.NO_DRAFT, (), TenantPolicy(TenantSetting.OFF), saving=0.3), 0, False, 0),
    ],
)
def test_a_request_gets_the_least_of_what_client_operator_and_plan_allow(
    client: router.SpeculationMode.ValueType, decision: Decision, tokens: int, always: bool, own: int
) -> None:
    """Of a draft worker; of the target's own drafts all, unless client or operator forbid drafts."""
    found = deciding(decision).allowance(a_request(choice=client))
    assert (found.max_draft_tokens, found.always_draft, found.max_own_draft_tokens) == (tokens, always, own)


@pytest.mark.parametrize(
    ("asked", "operator", "tokens"), [(None, None, 5), (7, None, 5), (7, 3, 3), (7, 9, 5), (0, 3, 0), (2, 3, 2)]
)
def test_the_bounds_of_client_operator_and_router_all_hold(
    asked: int | None, operator: int | None, tokens: int
) -> None:
    decision = Decision(Mode.ON, Reason.SAVES, ALL, TenantPolicy(max_draft_tokens=operator))
    assert deciding(decision).allowance(a_request(max_draft_tokens=asked)).max_draft_tokens == tokens


@pytest.mark.parametrize(
    ("router_s", "asked", "operator", "tokens"),
    [(3, None, None, MAX_DRAFT_TOKENS), (3, 8, None, 8), (3, 8, 6, 6), (3, 0, None, 0), (0, 8, None, 0)],
)
def test_a_routers_bound_on_draft_workers_is_none_on_what_the_target_drafts_unless_it_is_zero(
    router_s: int, asked: int | None, operator: int | None, tokens: int
) -> None:
    decision = Decision(Mode.ON, Reason.SAVES, ALL, TenantPolicy(max_draft_tokens=operator))
    found = deciding(decision, max_draft_tokens=router_s).allowance(a_request(max_draft_tokens=asked))
    assert (found.max_own_draft_tokens, found.max_draft_tokens) == (tokens, min(router_s, tokens))


def seen(policy: Policy, tenant: str, saving: float, rounds: int = 60) -> None:
    policy.record(tenant, "m", DRAFT).evidence.add_rounds(rounds=rounds, tokens=2 * rounds, saved=saving * rounds)


def test_a_router_that_is_alone_plans_on_its_own_evidence_and_new_tenants_begin_with_what_is_usual() -> None:
    policy = Policy(PolicyConfig())
    request = a_request()
    assert policy.allowance(request).max_draft_tokens == 5
    for second in range(20):
        seen(policy, "t", -0.6)
        policy.replan(FLEET, float(second))
    assert policy.decision("t", "m").mode is Mode.TRY
    assert policy.decision("new", "m").mode is Mode.TRY
    drawn = sum(policy.allowance(a_request(request_id=f"{n}")).max_draft_tokens > 0 for n in range(1000))
    assert 0 < drawn < 100


def test_measurements_are_kept_of_those_that_still_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_controller.router.speculation.policy._MAX_RECORDS", 3)
    policy = Policy(PolicyConfig())
    for number in range(5):
        seen(policy, "busy", 0.5)
        seen(policy, f"t{number}", 0.5)
    assert {key.tenant: found.rounds for key, found in policy.evidence().items()} == {"busy": 300, "t3": 60, "t4": 60}


def test_alternatives_of_a_head_at_one_place_are_one_verified_token() -> None:
    policy = Policy(PolicyConfig())
    commit = sequence.Commit(token_ids=[1, 2], num_drafted=1, num_verified=1, num_accepted=1)
    commit.sources.add(source="mtp", own=True, num_drafted=3, num_verified=3, num_accepted=1)
    policy.own_drafts(a_request(), Round.from_commit(commit, 20_000), price=0.2)
    (evidence,) = policy.evidence().values()
    assert (evidence.verified, evidence.accepted) == (1, 1)


def looked_up(policy: Policy, accepted: int, rounds: int = 60) -> None:
    commit = sequence.Commit(token_ids=range(accepted + 1), num_drafted=4, num_verified=4, num_accepted=accepted)
    commit.sources.add(source="ngram", own=True, num_drafted=4, num_verified=4, num_accepted=accepted)
    for _ in range(rounds):
        policy.own_drafts(a_request(), Round.from_commit(commit, 20_000), price=0.2)


@pytest.mark.parametrize(
    ("pool", "accepted", "modes"),
    [
        (-0.6, 3, (Mode.TRY, Mode.ON)),
        (0.6, 0, (Mode.ON, Mode.TRY)),
        (0.6, 3, (Mode.ON, Mode.ON)),
        (-0.6, 0, (Mode.TRY, Mode.TRY)),
    ],
)
def test_draft_workers_and_the_targets_own_drafts_are_each_decided_by_their_own_evidence(
    pool: float, accepted: int, modes: tuple[Mode, Mode]
) -> None:
    policy = Policy(PolicyConfig())
    for second in range(20):
        seen(policy, "t", pool)
        looked_up(policy, accepted)
        states = {**FLEET, own_drafts_of("m"): TargetState(frozenset(policy.own_sources["m"]))}
        policy.replan(states, float(second))
    assert (policy.decision("t", "m").mode, policy.decision("t", own_drafts_of("m")).mode) == modes
    allowances = [policy.allowance(a_request(request_id=f"{n}")) for n in range(200)]
    drafting = [
        sum(one.max_draft_tokens > 0 for one in allowances),
        sum(one.max_own_draft_tokens > 0 for one in allowances),
    ]
    # Some of the requests try what does not pay.
    assert [count > 100 for count in drafting] == [mode is Mode.ON for mode in modes]
    assert all(count < 40 for count, mode in zip(drafting, modes, strict=True) if mode is Mode.TRY)


def test_what_a_target_makes_itself_is_allowed_until_a_router_has_seen_what_it_saves() -> None:
    cell = Cell("t", own_drafts_of("m"))
    for decision in (
        Decision(Mode.OFF, Reason.NO_DRAFT, saving=-0.3),
        Decision(Mode.ON, Reason.SAVES, (("ngram", 1.0),)),
    ):
        allowed = Policy(PolicyConfig(), decisions={cell: decision}).allowance(a_request())
        assert allowed.max_own_draft_tokens == MAX_DRAFT_TOKENS
    costs = Policy(PolicyConfig(), decisions={cell: Decision(Mode.TRY, Reason.COSTS, (("ngram", 0.0),))})
    assert costs.allowance(a_request()).max_own_draft_tokens == 0
    assert costs.allowance(a_request(choice=ON)).max_own_draft_tokens == MAX_DRAFT_TOKENS


@pytest.mark.parametrize(
    ("set_by_operator", "tokens", "always"),
    [
        (TenantPolicy(TenantSetting.ON, override_draft_tokens=2), 2, True),
        (TenantPolicy(max_draft_tokens=3), 3, False),
        (TenantPolicy(TenantSetting.OFF), 0, False),
    ],
)
def test_what_an_operator_has_set_holds_where_no_draft_worker_fits_the_target(
    set_by_operator: TenantPolicy, tokens: int, always: bool
) -> None:
    """Then only the target's own drafts are planned; at first no router has seen any."""
    planner, fleet = Planner(), {"m": TargetState()}
    unseen = planner.step({"t": set_by_operator}, fleet, 0.0)
    fleet[own_drafts_of("m")] = TargetState(frozenset({"ngram"}))
    for decisions in (unseen, unseen | planner.step({"t": set_by_operator}, fleet, 1.0)):
        policy = Policy(PolicyConfig(), decisions=decisions)
        allowance = policy.allowance(a_request())
        assert (allowance.max_own_draft_tokens, allowance.always_draft) == (tokens, always)
        assert policy.allowance(a_request(tenant="other")).max_own_draft_tokens == MAX_DRAFT_TOKENS
    as_auto = Decision(Mode.ON, Reason.SAVES, (), TenantPolicy(on_counts_as_auto=True))
    policy = Policy(PolicyConfig(), decisions={Cell("t", own_drafts_of("m")): as_auto})
    assert policy.counts_on_as_auto(a_request(choice=ON))


def led(decisions: Mapping[Cell, Decision], saving: float) -> Policy:
    """A policy whose control plane has just been lost, at second 0."""
    policy = Policy(PolicyConfig(), led=True)
    sums = [(EvidenceKey(*cell, VERSION), [1000, 1500, saving * 1000, 2000, 0, 0, 0, 5000]) for cell in decisions]
    policy.follow(decisions, sums)
    policy.lost(0.0)
    return policy


def test_the_last_plan_holds_for_six_seconds_and_is_gone_on_from_then() -> None:
    costs = Decision(Mode.TRY, Reason.COSTS, ((VERSION, 0.02),), saving=-0.5, rounds=5000)
    policy = led({Cell("t", "m"): costs}, -0.5)
    seen(policy, "t", 0.9)
    for second in range(6):
        assert not policy.replan(FLEET, float(second))
    assert policy.decision("t", "m") is costs
    policy.replan(FLEET, LEADER_GONE_S)
    # One second of better news is not enough to leave it.
    assert policy.decision("t", "m").mode is Mode.TRY
    for second in range(6, 40):
        seen(policy, "t", 0.9)
        policy.replan(FLEET, float(second))
    assert policy.decision("t", "m").mode is Mode.ON


@pytest.mark.parametrize(
    ("mode", "word", "until", "then"),
    [
        (Mode.OFF, TenantPolicy(TenantSetting.OFF, until_s=20.0), 0, 5),
        (Mode.ON, TenantPolicy(until_s=20.0, override_draft_tokens=2, max_draft_tokens=4), 2, 4),
    ],
)
def test_an_operators_word_expires_without_the_control_plane_too(
    mode: Mode, word: TenantPolicy, until: int, then: int
) -> None:
    decision = Decision(mode, Reason.SAVES if mode is Mode.ON else Reason.OPERATOR_OFF, ALL, word, saving=0.5)
    policy = led({Cell("t", "m"): decision}, 0.5)
    for second in range(20):
        policy.replan(FLEET, float(second))
        assert policy.allowance(a_request()).max_draft_tokens == until
    policy.replan(FLEET, 20.0)
    assert policy.allowance(a_request()).max_draft_tokens == then


def test_a_decision_for_anybody_holds_for_tenants_without_one_of_their_own() -> None:
    own, anybody = Cell("t", "m"), Cell(ANYBODY, "m")
    policy = Policy(PolicyConfig(), decisions={own: Decision(Mode.ON, Reason.SAVES)})
    assert [policy.decides([anybody], tenant, "m") for tenant in ("t", "new")] == [False, True]
    assert [policy.decides([own], tenant, "m") for tenant in ("t", "new")] == [True, False]
    assert not policy.decides([anybody], "new", "another model")


def test_of_a_deleted_tenant_nothing_is_left() -> None:
    policy = led(
        {Cell("t", "m"): Decision(Mode.OFF, Reason.OPERATOR_OFF, policy=TenantPolicy(TenantSetting.OFF))}, -0.5
    )
    policy.forget([Cell("t", "m")])
    assert policy.decision("t", "m").policy == TenantPolicy()
    policy.replan(FLEET, LEADER_GONE_S)
    assert Cell("t", "m") not in policy.decisions


@pytest.mark.parametrize(("client", "as_auto", "counts"), [(ON, True, True), (ON, False, False), (AUTO, True, False)])
def test_a_client_is_told_where_its_on_counts_as_auto(
    client: router.SpeculationMode.ValueType, as_auto: bool, counts: bool
) -> None:
    decision = Decision(Mode.ON, Reason.SAVES, ALL, TenantPolicy(on_counts_as_auto=as_auto))
    assert deciding(decision).counts_on_as_auto(a_request(choice=client)) is counts
