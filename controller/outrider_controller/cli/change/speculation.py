"""outrider set speculation, set quota, and explain: what operators say of a tenant, and why it speculates or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import click
import grpc
from outrider.rpc.v1 import control_pb2, policy_pb2, tenants_pb2, worker_pb2

from outrider_controller.autoscaler.evidence import model_of
from outrider_controller.autoscaler.plan import Reason
from outrider_controller.autoscaler.tuning import FIRST_ROUNDS, NOTICEABLE
from outrider_controller.cli.asking import span_option
from outrider_controller.cli.change.tenants import QUOTAS, tenant_row
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.drafts.versions import rollout_lines, rollout_row
from outrider_controller.cli.output import emit, moment, note

_SETTINGS = {"on": "ON", "off": "OFF", "auto": "AUTO"}
_NO_BOUND = "none"
# Of a round of which nothing is known; and the least time that a round is said to take, in plain rounds.
_USUAL_TOKENS, _MIN_TIME = 2.0, 0.05


@click.group("set")
def set_group() -> None:
    """Change what holds for a tenant, running requests included."""


@set_group.command("speculation")
@click.argument("tenant")
@click.argument("setting", type=click.Choice(list(_SETTINGS)))
@click.option("--max-draft-tokens", type=click.IntRange(1, 64), metavar="K", help="Most drafted tokens per step.")
@span_option("--ttl", "ttl_s", None, "Back to auto after this time: 30s, 10m, 12h, 90d.", least_s=1)
@control_options("text", "json", "yaml")
def set_speculation(
    tenant: str, setting: str, max_draft_tokens: int | None, ttl_s: int, control: str, output: str
) -> None:
    """Set TENANT's speculation to on, off or auto. It overrides the plan.

    Takes effect within a second, for running requests too. `auto` without --max-draft-tokens removes what was set.
    """
    request = control_pb2.SetSpeculationRequest(
        tenant=tenant,
        setting=tenants_pb2.SpeculationSetting.Value(f"SPECULATION_SETTING_{_SETTINGS[setting]}"),
        max_draft_tokens=max_draft_tokens,
        ttl_ms=1000 * ttl_s,
    )
    override = ask_control(control, lambda stub: stub.SetSpeculation(request)).override
    row = {
        "tenant": tenant,
        "setting": setting,
        "max_draft_tokens": max_draft_tokens,
        "until": moment(override.until_unix_ms // 1000),
    }
    until = f" until {row['until']}" if row["until"] else ""
    capped = f", at most {max_draft_tokens} tokens a step" if max_draft_tokens else ""
    emit("set_speculation", row, output, f"{tenant}: speculation {setting}{capped}{until}")


@set_group.command("quota")
@click.argument("tenant")
@click.option("--requests-per-second", metavar="N", help="A number, or none for no limit.")
@click.option("--tokens-per-minute", metavar="N", help="Of prompts and answers; a number, or none.")
@click.option("--concurrent-requests", metavar="N", help="At once; a number, or none.")
@click.option(
    "--burst-requests", metavar="N", help="Requests that may start at once after a pause; none: those of a second."
)
@click.option(
    "--burst-tokens", metavar="N", help="Tokens that may be used at once after a pause; none: those of a minute."
)
@control_options("text", "json", "yaml")
def set_quota(tenant: str, control: str, output: str, **given: str | None) -> None:
    """Change bounds of TENANT's quota; those not named stay as they are.

    Exit code 4 when somebody else has changed the tenant meanwhile.
    """
    if not any(given.values()):
        raise click.UsageError(f"nothing to set: name one of {', '.join(_flag(name) for name in QUOTAS)}")
    bounds = {name: _bound(name, value) for name, value in given.items() if value is not None}

    async def change(stub: Control) -> tenants_pb2.Tenant:
        record = (await stub.GetTenant(control_pb2.GetTenantRequest(name=tenant))).tenant
        for name, value in bounds.items():
            record.quota.ClearField(name)  # type: ignore[arg-type]  # One of its fields.
            if value is not None:
                setattr(record.quota, name, value)
        await stub.PutTenants(control_pb2.PutTenantsRequest(tenants=[record]))
        return record

    row = tenant_row(ask_control(control, change))
    quota = ", ".join(f"{name} {row[name]:g}" for name in QUOTAS if row[name] is not None)
    emit("set_quota", row, output, f"{tenant}: {quota or 'no bound'}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _bound(name: str, value: str) -> float | int | None:
    """None for no bound. Raises UsageError."""
    if value == _NO_BOUND:
        return None
    try:
        bound = float(value) if name == "requests_per_second" else int(value)
        setattr(tenants_pb2.Quota(), name, bound)
    except ValueError:
        raise click.UsageError(f"{_flag(name)}: {value!r} is no bound: a positive number, or {_NO_BOUND}") from None
    return bound


@click.command("explain")
@click.argument("tenant")
@control_options("text", "json", "yaml")
def explain(tenant: str, control: str, output: str) -> None:
    """Say why TENANT's requests speculate or not, with the numbers, and what would change it."""
    answer = ask_control(control, lambda stub: stub.Explain(control_pb2.ExplainRequest(tenant=tenant)))
    paced = ask_control(control, lambda stub: pacing_of(stub, tenant))
    if output == "text" and not answer.known:
        note(f"{tenant} has no evidence yet: it starts with the mean of all tenants")
    lines = [line for decision in answer.decisions for line in explained(tenant, decision)]
    lines += paced_lines(tenant, paced) if paced is not None else []
    targets = [decision_row(one) for one in answer.decisions]
    lines += [line for rollout in answer.rollouts for line in rollout_lines(rollout)]
    body = {"tenant": tenant, "known": answer.known, "beats_ms": paced, "targets": targets}
    body["rollouts"] = [rollout_row(one) for one in answer.rollouts]
    emit("explain", body, output, "\n".join(lines) or f"{tenant}: no router has reported a target yet")


async def pacing_of(stub: Control, tenant: str) -> list[float] | None:
    """The beats of the gateways, if the tenant's streams are paced; else None."""
    try:
        record = (await stub.GetTenant(control_pb2.GetTenantRequest(name=tenant))).tenant
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise
    if record.pacing != tenants_pb2.PACING_CONSTANT:
        return None
    request = control_pb2.ListWorkersRequest(role=worker_pb2.WORKER_ROLE_GATEWAY)
    return sorted(round(one.load.beat_ms, 1) for one in (await stub.ListWorkers(request)).workers)


def paced_lines(tenant: str, beats_ms: Sequence[float]) -> Iterator[str]:
    shown = " to ".join(f"{beat:g}" for beat in sorted({beats_ms[0], beats_ms[-1]})) if beats_ms else ""
    beat = f" of {shown} ms" if shown else ", the mean time per token"
    yield f"{tenant}: streams are paced: a frame of constant size at each beat{beat}"
    yield "  a token comes half a beat later on the average, and an answer ends at most one beat later"


def decision_row(decision: policy_pb2.TenantDecision) -> dict[str, Any]:
    evidence = decision.evidence
    return {
        "target": decision.target,
        "mode": mode_of(decision),
        "reason": decision.reason,
        "draft": evidence.draft,
        "saving": round(decision.saving, 3),
        "interval": [round(decision.lower, 3), round(decision.upper, 3)],
        "times_plain": times_plain(evidence, decision.saving),
        "times_plain_interval": [times_plain(evidence, decision.lower), times_plain(evidence, decision.upper)],
        "rounds": round(decision.rounds),
        "acceptance": round(evidence.accepted / evidence.verified, 3) if evidence.verified else None,
        "tokens_per_round": round(evidence.tokens / evidence.rounds, 2) if evidence.rounds else None,
        "late": round(evidence.late / evidence.rounds, 3) if evidence.rounds else None,
        "price": round(decision.price, 4),
        "made_by": "target" if model_of(decision.target)[1] else "draft",
        "sources": [source_row(one) for one in (evidence, *decision.other_evidence) if one.rounds],
        "drafting_share": round(sum(share.share for share in decision.shares), 4),
        "why": because(decision),
        "what_would_change_it": would_change(decision),
    }


def times_plain(evidence: policy_pb2.DraftEvidence, saving: float) -> float:
    """How many times as fast as plain decoding rounds are that save so many plain rounds each."""
    tokens = evidence.tokens / evidence.rounds if evidence.rounds else _USUAL_TOKENS
    return round(tokens / max(tokens - saving, _MIN_TIME), 2)


def source_row(evidence: policy_pb2.DraftEvidence) -> dict[str, Any]:
    """What one draft version, or one kind of source in the target, saves the tenant."""
    return {
        "source": evidence.draft,
        "saving": round(evidence.saved / evidence.rounds, 3),
        "times_plain": times_plain(evidence, evidence.saved / evidence.rounds),
        "rounds": round(evidence.seen),
        "acceptance": round(evidence.accepted / evidence.verified, 3) if evidence.verified else None,
    }


def _source_line(row: dict[str, Any]) -> str:
    accepted = "nothing verified" if row["acceptance"] is None else f"{row['acceptance']:.0%} accepted"
    return f"  source  {row['source']}: {row['times_plain']:.2f} × plain, {accepted}, {row['rounds']:,} rounds"


def explained(tenant: str, decision: policy_pb2.TenantDecision) -> Iterator[str]:
    """Lines."""
    row = decision_row(decision)
    model, own = model_of(decision.target)
    yield (
        f"{tenant} at {model}, " + ("drafts that the target makes itself: " if own else "draft workers: ") + row["mode"]
    )
    yield f"  why     {row['why']}"
    yield f"  change  {row['what_would_change_it']}"
    if decision.rounds:
        low, high = row["times_plain_interval"]
        source = f" of {row['draft']}" if own else ""
        speed = f"{row['times_plain']:.2f} × plain ({low:.2f} to {high:.2f}, 80 %)"
        yield f"  speed   {speed}, {row['rounds']:,} rounds{source}"
        accepted = f"{row['acceptance']:.0%} accepted" if row["acceptance"] is not None else "nothing verified"
        if row["tokens_per_round"] is not None:
            late = f"{row['late']:.0%} without a draft in time"
            yield f"  rounds  {row['tokens_per_round']} tokens each, {accepted}" + ("" if own else f", {late}")
    yield from map(_source_line, row["sources"])
    share = f"  drafts  {row['drafting_share']:.1%} of requests"
    if own:
        yield f"{share}, all sources of the target"
        return
    yield f"{share}, {row['draft'] or 'no version'}"
    yield f"  price   {row['price']:.3f}: a drafted token has to be at least so likely to be worth its row"


def mode_of(decision: policy_pb2.TenantDecision) -> str:
    return policy_pb2.PlanMode.Name(decision.mode).removeprefix("PLAN_MODE_").lower()


def because(decision: policy_pb2.TenantDecision) -> str:
    """One sentence."""
    if decision.reason == Reason.NO_DRAFT and model_of(decision.target)[1]:
        return "no target has made drafts itself yet; targets are allowed to"
    until = decision.override.until_unix_ms
    until_text = f" until {datetime.fromtimestamp(until / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}" if until else ""
    return {
        Reason.UNKNOWN: f"only {decision.rounds:.0f} rounds are known: the mean of all tenants at the target decides",
        Reason.SAVES: "drafts clearly save time",
        Reason.COSTS: "drafts clearly cost more time than they save",
        Reason.BETWEEN: "it is not clear whether drafts save or cost time: the mode stays",
        Reason.DWELL: f"the evidence is for another mode, but this one holds for at least {FIRST_ROUNDS:.0f} rounds",
        Reason.OPERATOR_ON: f"an operator set it to on{until_text}",
        Reason.OPERATOR_OFF: f"an operator set it to off{until_text}",
        Reason.LOAD: "the target is so full that no drafted token is worth its row",
        Reason.NO_DRAFT: "no live draft fits this target",
    }.get(Reason(decision.reason) if decision.reason in set(Reason) else Reason.UNKNOWN, decision.reason)


def would_change(decision: policy_pb2.TenantDecision) -> str:
    """One sentence."""
    if decision.reason in (Reason.OPERATOR_ON, Reason.OPERATOR_OFF):
        return "outrider set speculation TENANT auto removes that"
    if decision.reason == Reason.LOAD:
        return "on again when the price has halved: fewer requests, or more targets"
    if decision.reason == Reason.NO_DRAFT:
        own = model_of(decision.target)[1]
        return "a draft of a lookup or a head" if own else "a draft with the target's tokenizer and vocabulary"
    if decision.mode == policy_pb2.PLAN_MODE_ON:
        return f"try, once the interval's upper end is below {_speeds(decision, 0.0, decision.upper)}"
    return f"on, once the interval's lower end is above {_speeds(decision, NOTICEABLE, decision.lower)}"


def _speeds(decision: policy_pb2.TenantDecision, bound: float, now: float) -> str:
    """Both from what a round saves."""
    evidence = decision.evidence
    return f"{times_plain(evidence, bound):.2f} × plain: now {times_plain(evidence, now):.2f}"
