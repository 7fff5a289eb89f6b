"""What the plan has decided for a tenant, as a flat row with its reasons in words: for `outrider explain`, `outrider
top` and the console. A speed is only said from enough evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from outrider.rpc.enums import value_name
from outrider.rpc.v1 import control_pb2, policy_pb2, worker_pb2

from outrider_controller.autoscaler.evidence import model_of
from outrider_controller.autoscaler.plan import Reason
from outrider_controller.autoscaler.tuning import FIRST_ROUNDS, NOTICEABLE

# Of a round of which nothing is known; and the fewest tokens that its time is said to give without the draft.
_USUAL_TOKENS, _MIN_TIME = 2.0, 0.05


def decision_row(decision: policy_pb2.TenantDecision) -> dict[str, Any]:
    """`times_plain`, its interval and `price` are None while they are not measured."""
    evidence = decision.evidence
    measured = decision.rounds >= FIRST_ROUNDS
    return {
        "target": decision.target,
        "mode": mode_of(decision),
        "reason": decision.reason,
        "draft": evidence.draft,
        "saving": round(decision.saving, 3),
        "interval": [round(decision.lower, 3), round(decision.upper, 3)],
        "times_plain": times_plain(evidence, decision.saving) if measured else None,
        "times_plain_interval": [times_plain(evidence, end) for end in (decision.lower, decision.upper)]
        if measured
        else None,
        "rounds": round(decision.rounds),
        "acceptance": round(evidence.accepted / evidence.verified, 3) if evidence.verified else None,
        "tokens_per_round": round(evidence.tokens / evidence.rounds, 2) if evidence.rounds else None,
        "late": round(evidence.late / evidence.rounds, 3) if evidence.rounds else None,
        "price": round(decision.price, 4) or None,
        "made_by": "target" if model_of(decision.target)[1] else "draft",
        "sources": [source_row(one) for one in (evidence, *decision.other_evidence) if one.rounds],
        "drafting_share": round(sum(share.share for share in decision.shares), 4),
        "why": because(decision),
        "what_would_change_it": would_change(decision),
    }


def server_caps(workers: Iterable[control_pb2.WorkerStatus], tenant: str) -> list[dict[str, Any]]:
    """By target worker the most drafted tokens that its own options allow the tenant; None: it sets no bound."""
    targets = [status.info for status in workers if status.info.role == worker_pb2.WORKER_ROLE_TARGET]
    return [{"worker": one.worker_id, "target": one.model, "max_draft_tokens": _cap(one, tenant)} for one in targets]


def _cap(info: worker_pb2.WorkerInfo, tenant: str) -> int | None:
    caps = info.tenant_draft_tokens
    return caps.get(tenant, caps.get("", 0)) if caps else None


def under_servers(row: dict[str, Any], caps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A decision's row as servers carry it out: off where each allows the tenant no drafts, whatever the plan says."""
    own = [one for one in caps if one["target"] == model_of(row["target"])[0]]
    if not own or any(one["max_draft_tokens"] != 0 for one in own):
        return row
    return row | {
        "mode": "off",
        "why": "its server allows the tenant no drafts: max_draft_tokens is 0 in its --additional-config",
        "what_would_change_it": "another max_draft_tokens there, and a restart of the server",
    }


def speed_of(row: dict[str, Any]) -> str:
    """The speed of a row in words."""
    if row["times_plain"] is None:
        return "not measured yet"
    low, high = row["times_plain_interval"]
    return f"{row['times_plain']:.2f} ({low:.2f} to {high:.2f})"


def times_plain(evidence: policy_pb2.DraftEvidence, saving: float) -> float:
    """How many times as fast rounds are as without the draft, if each saves so many tokens."""
    tokens = evidence.tokens / evidence.rounds if evidence.rounds else _USUAL_TOKENS
    return round(tokens / max(tokens - saving, _MIN_TIME), 2)


def source_row(evidence: policy_pb2.DraftEvidence) -> dict[str, Any]:
    """What one draft version, or one kind of source in the target, saves the tenant."""
    measured = evidence.seen >= FIRST_ROUNDS
    return {
        "source": evidence.draft,
        "saving": round(evidence.saved / evidence.rounds, 3),
        "times_plain": times_plain(evidence, evidence.saved / evidence.rounds) if measured else None,
        "rounds": round(evidence.seen),
        "acceptance": round(evidence.accepted / evidence.verified, 3) if evidence.verified else None,
    }


def mode_of(decision: policy_pb2.TenantDecision) -> str:
    return value_name(policy_pb2.PlanMode.DESCRIPTOR, decision.mode)


def because(decision: policy_pb2.TenantDecision) -> str:
    """One sentence."""
    if decision.reason == Reason.NO_DRAFT and model_of(decision.target)[1]:
        return "no target has made drafts itself yet; targets are allowed to"
    reason = Reason(decision.reason) if decision.reason in set(Reason) else Reason.UNKNOWN
    if reason is Reason.BETWEEN and decision.upper < NOTICEABLE:
        return "drafts seem to save hardly any time, but the mode has changed often of late: the mode stays"
    if reason is Reason.BETWEEN and decision.lower > 0:
        return "drafts seem to save a little time: the mode stays"
    until = decision.override.until_unix_ms
    if until and reason in (Reason.OPERATOR_ON, Reason.OPERATOR_OFF):
        return f"{reason.in_words} until {datetime.fromtimestamp(until / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return reason.in_words


def would_change(decision: policy_pb2.TenantDecision) -> str:
    """One sentence."""
    if decision.reason in (Reason.OPERATOR_ON, Reason.OPERATOR_OFF):
        return "outrider set speculation TENANT auto removes that"
    if decision.reason == Reason.LOAD:
        return "on again when the price has halved: fewer requests, or more targets"
    if decision.reason == Reason.NO_DRAFT:
        own = model_of(decision.target)[1]
        return "a draft of a lookup or a head" if own else "a draft with the target's tokenizer and vocabulary"
    if decision.rounds < FIRST_ROUNDS:
        return f"{FIRST_ROUNDS:.0f} rounds of its own"
    evidence = decision.evidence
    bound = f"{times_plain(evidence, NOTICEABLE):.2f} × plain"
    if decision.mode == policy_pb2.PLAN_MODE_ON:
        return f"try, once the interval's upper end is below {bound}: now {times_plain(evidence, decision.upper):.2f}"
    return f"on, once the interval's lower end is above {bound}: now {times_plain(evidence, decision.lower):.2f}"
