"""outrider set speculation, set quota, and explain: what operators say of a tenant, and why it speculates or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
from outrider.rpc.v1 import control_pb2, policy_pb2, tenants_pb2, worker_pb2

from outrider_controller.autoscaler.evidence import model_of
from outrider_controller.autoscaler.tuning import FIRST_ROUNDS
from outrider_controller.cli.asking import span_option
from outrider_controller.cli.change.tenants import QUOTAS, tenant_row
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.drafts.versions import rollout_lines, rollout_row
from outrider_controller.cli.output import emit, moment, note
from outrider_controller.control.api.decisions import decision_row, server_caps, under_servers

_SETTINGS = {"on": "ON", "off": "OFF", "auto": "AUTO"}
_NO_BOUND = "none"


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

    async def ask(stub: Control) -> tuple[control_pb2.ExplainResponse, control_pb2.ListWorkersResponse]:
        answer = await stub.Explain(control_pb2.ExplainRequest(tenant=tenant))
        return answer, await stub.ListWorkers(control_pb2.ListWorkersRequest(role=worker_pb2.WORKER_ROLE_TARGET))

    answer, listed = ask_control(control, ask)
    caps = server_caps(listed.workers, tenant)
    if output == "text" and not answer.known:
        note(f"{tenant} has no evidence yet: it starts with the mean of all tenants")
    lines = [line for decision in answer.decisions for line in explained(tenant, decision, caps)]
    targets = [under_servers(decision_row(one), caps) for one in answer.decisions]
    servers = [one for one in caps if one["max_draft_tokens"] is not None]
    lines += [f"  server  {one['worker']}: {_allowed(one['max_draft_tokens'])}, by its own options" for one in servers]
    lines += [line for rollout in answer.rollouts for line in rollout_lines(rollout)]
    if answer.rollouts and all(row["mode"] != "on" for row in targets):
        lines.append("  waits    for requests of this tenant that draft: its mode is not on")
    body = {"tenant": tenant, "known": answer.known, "targets": targets, "servers": servers}
    body["rollouts"] = [rollout_row(one) for one in answer.rollouts]
    emit("explain", body, output, "\n".join(lines) or f"{tenant}: no router has reported a target yet")


def _source_line(row: dict[str, Any]) -> str:
    accepted = "nothing verified" if row["acceptance"] is None else f"{row['acceptance']:.0%} accepted"
    speed = "speed not measured yet" if row["times_plain"] is None else f"{row['times_plain']:.2f} × plain"
    return f"  source  {row['source']}: {speed}, {accepted}, {row['rounds']:,} rounds"


def _allowed(cap: int) -> str:
    return f"at most {cap} drafted tokens a step" if cap else "no drafts"


def explained(tenant: str, decision: policy_pb2.TenantDecision, caps: Sequence[dict[str, Any]] = ()) -> Iterator[str]:
    """Lines. `caps`: what servers allow the tenant."""
    row = under_servers(decision_row(decision), caps)
    model, own = model_of(decision.target)
    yield (
        f"{tenant} at {model}, " + ("drafts that the target makes itself: " if own else "draft workers: ") + row["mode"]
    )
    yield f"  why     {row['why']}"
    yield f"  change  {row['what_would_change_it']}"
    if decision.rounds:
        source = f" of {row['draft']}" if own else ""
        if row["times_plain"] is None:
            yield f"  speed   not measured yet: {row['rounds']:,} of {FIRST_ROUNDS:.0f} rounds{source}"
        else:
            low, high = row["times_plain_interval"]
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
    if row["price"] is None:
        yield "  price   not measured yet, or a row is free: every drafted token is verified"
    else:
        yield f"  price   {row['price']:.3g}: a drafted token has to be at least so likely to be worth its row"
