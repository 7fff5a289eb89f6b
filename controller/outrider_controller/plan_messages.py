"""Conversion of decisions and evidence to messages and back, for routers, control plane and metadata store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from outrider.limits import MAX_WAIT_US, MAX_WEIGHT
from outrider.rpc.v1 import policy_pb2 as policy
from outrider.rpc.v1 import tenants_pb2 as tenants
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.autoscaler.estimator import STATE
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Decision, Mode, Reason, TargetState, TenantPolicy, TenantSetting
from outrider_controller.autoscaler.planner import DecayedSums

_SUMS = tuple(each.name for each in fields(Evidence))
_MODES = {Mode.OFF: policy.PLAN_MODE_OFF, Mode.TRY: policy.PLAN_MODE_TRY, Mode.ON: policy.PLAN_MODE_ON}
_MODE_OF = {value: mode for mode, value in _MODES.items()}
SETTINGS = {
    TenantSetting.AUTO: tenants.SPECULATION_SETTING_AUTO,
    TenantSetting.ON: tenants.SPECULATION_SETTING_ON,
    TenantSetting.OFF: tenants.SPECULATION_SETTING_OFF,
}
_SETTING_OF = {value: setting for setting, value in SETTINGS.items()}
_REASONS = frozenset(Reason)
_MAX_SUM = 1e12
# Tenants' weights may differ by far more; the value of a saved token stays between those of batch and latency.
_BATCH, _LATENCY = 0.5, 2.0
_MAX_NAME = 512
_MAX_TARGETS, _MAX_DRAFTS = 1000, 100
MAX_PRICE = 1e6
# The year 9999: a later end is none.
_NEVER_MS = 253_402_300_799_000


def draft_version(info: worker.WorkerInfo) -> str:
    """The name under which a draft's evidence is kept. Not the worker's id, because workers change."""
    return f"{info.model}@{info.model_revision}/{info.draft_kind}"


def evidence_to_proto(key: EvidenceKey, evidence: Evidence) -> policy.DraftEvidence:
    sums = {name: getattr(evidence, name) for name in _SUMS}
    return policy.DraftEvidence(tenant=key.tenant, target=key.target, draft=key.draft, **sums)


def evidence_from_proto(message: policy.DraftEvidence) -> tuple[EvidenceKey, Evidence] | None:
    """None for impossible numbers: the plan uses a peer's numbers, so they are checked."""
    sums = [float(getattr(message, name)) for name in _SUMS]
    names = message.tenant, message.target, message.draft
    if not all(math.isfinite(one) and abs(one) <= _MAX_SUM for one in sums) or max(map(len, names)) > _MAX_NAME:
        return None
    evidence = Evidence(*sums)
    return (EvidenceKey(*names), evidence) if min(sums[0], sums[1], *sums[3:]) >= 0 else None


def sums_to_proto(known: DecayedSums) -> policy.DraftEvidence:
    key, values = known
    return policy.DraftEvidence(
        tenant=key.tenant, target=key.target, draft=key.draft, **dict(zip(STATE, values, strict=True))
    )


def sums_from_proto(message: policy.TenantDecision) -> Iterator[DecayedSums]:
    """All evidence in a decision's message."""
    for one in (message.evidence, *message.other_evidence):
        values = [float(getattr(one, name)) for name in STATE]
        # A resumed decision may not name its draft. One impossible sum would spoil the means of all tenants.
        if one.draft and all(map(math.isfinite, values)):
            yield EvidenceKey(one.tenant, one.target, one.draft), values


def report_to_proto(model: str, state: TargetState) -> policy.TargetReport:
    return policy.TargetReport(
        model=model,
        drafts=sorted(state.drafts),
        candidates=sorted(state.candidates),
        row_price=state.price,
        best_chance=state.best_chance,
    )


def reported_states(message: policy.FollowRequest) -> dict[str, TargetState]:
    """By model. So many and such names as no fleet has are left out: each is planned for with each tenant."""
    found = [target for target in message.targets[:_MAX_TARGETS] if len(target.model) <= _MAX_NAME]
    return {target.model: reported_state(target) for target in found}


def reported_state(message: policy.TargetReport) -> TargetState:
    return TargetState(
        _names(message.drafts),
        bounded(message.row_price, MAX_PRICE),
        bounded(message.best_chance, 1.0),
        _names(message.candidates),
    )


def _names(given: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in given[:_MAX_DRAFTS] if len(name) <= _MAX_NAME)


def bounded(value: float, most: float) -> float:
    """0, as where nothing is known, for a number that is none."""
    return min(max(0.0, value), most)


def speculation_of(tenant: tenants.Tenant) -> tenants.SpeculationPolicy | None:
    """None: the default policy. Without a weight for speculation, a saved token's value is the tenant's weight."""
    if not tenant.weight and not tenant.HasField("speculation"):
        return None
    policy_set = tenants.SpeculationPolicy()
    policy_set.CopyFrom(tenant.speculation)
    policy_set.weight = policy_set.weight or min(max(tenant.weight or 1.0, _BATCH), _LATENCY)
    return policy_set


def tenant_policy(
    record: tenants.SpeculationPolicy | None, override: tenants.SpeculationOverride | None, *, clock_s: float = 0.0
) -> TenantPolicy:
    """The policy from a tenant's record and an operator's override. `clock_s`: the reader's clock at Unix second 0."""
    record = record or tenants.SpeculationPolicy()
    override = override or tenants.SpeculationOverride()
    return TenantPolicy(
        speculation=_SETTING_OF.get(override.setting, TenantSetting.AUTO),
        until_s=override.until_unix_ms / 1000 + clock_s if 0 < override.until_unix_ms < _NEVER_MS else math.inf,
        override_draft_tokens=override.max_draft_tokens if override.HasField("max_draft_tokens") else None,
        max_draft_tokens=record.max_draft_tokens if record.HasField("max_draft_tokens") else None,
        max_wait_us=min(record.max_wait_ms * 1000, MAX_WAIT_US) if record.HasField("max_wait_ms") else None,
        weight=min(record.weight, MAX_WEIGHT) if record.weight > 0 else 1.0,
        min_acceptance=record.min_acceptance if record.HasField("min_acceptance") else None,
        on_counts_as_auto=record.on_counts_as_auto,
    )


def decision_to_proto(cell: Cell, decision: Decision, sums: Iterable[DecayedSums]) -> policy.TenantDecision:
    """`sums`: of every known draft for the cell."""
    evidence = {one.draft: one for one in map(sums_to_proto, sums)}
    best = evidence.pop(decision.draft, None)
    return policy.TenantDecision(
        tenant=cell.tenant,
        target=cell.target,
        mode=_MODES[decision.mode],
        reason=decision.reason,
        shares=[policy.DraftShare(draft=draft, share=share) for draft, share in decision.draft_shares],
        policy=_policy_to_proto(decision.policy),
        override=_override_to_proto(decision.policy),
        saving=decision.saving,
        lower=decision.lower,
        upper=decision.upper,
        rounds=decision.rounds,
        price=decision.price,
        evidence=best or policy.DraftEvidence(tenant=cell.tenant, target=cell.target, draft=decision.draft),
        other_evidence=evidence.values(),
        changes=decision.changes,
    )


def decision_from_proto(message: policy.TenantDecision, *, clock_s: float = 0.0) -> tuple[Cell, Decision]:
    return Cell(message.tenant, message.target), Decision(
        mode=_MODE_OF.get(message.mode, Mode.ON),
        reason=Reason(message.reason) if message.reason in _REASONS else Reason.UNKNOWN,
        draft_shares=tuple((share.draft, bounded(share.share, 1.0)) for share in message.shares),
        policy=tenant_policy(message.policy, message.override, clock_s=clock_s),
        saving=message.saving,
        lower=message.lower,
        upper=message.upper,
        rounds=message.rounds,
        draft=message.evidence.draft,
        price=message.price,
        changes=message.changes,
    )


def _policy_to_proto(given: TenantPolicy) -> tenants.SpeculationPolicy:
    return tenants.SpeculationPolicy(
        max_draft_tokens=given.max_draft_tokens,
        max_wait_ms=None if given.max_wait_us is None else given.max_wait_us // 1000,
        weight=given.weight,
        min_acceptance=given.min_acceptance,
        on_counts_as_auto=given.on_counts_as_auto,
    )


def _override_to_proto(given: TenantPolicy) -> tenants.SpeculationOverride:
    return tenants.SpeculationOverride(
        setting=SETTINGS[given.speculation],
        max_draft_tokens=given.override_draft_tokens,
        until_unix_ms=round(given.until_s * 1000) if math.isfinite(given.until_s) else 0,
    )
