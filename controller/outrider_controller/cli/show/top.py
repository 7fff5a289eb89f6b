"""outrider top"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import grpc
from outrider.rpc.v1 import control_pb2, policy_pb2, trace_pb2, worker_pb2

from outrider_controller.cli.asking import NumberRange
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.output import acceptance, emit, table_lines
from outrider_controller.cli.show.sequences import note_unreachable
from outrider_controller.cli.watching import repeated
from outrider_controller.control.api.decisions import decision_row, server_caps, speed_of, under_servers
from outrider_controller.control.api.rows import worker_row

_TENANTS = (
    "tenant",
    "running",
    "requests_per_s",
    "tokens_per_s",
    "verified_per_s",
    "acceptance",
    "made_by",
    "mode",
    "times_plain",
    "price",
)
_WORKERS = ("worker", "role", "status", "running", "waiting", "kv_use", "tokens_per_s", "verified_per_s", "acceptance")
# Tenants whose decisions are asked for: a page shows hardly more.
_EXPLAINED = 50
_SERVING = (worker_pb2.WORKER_ROLE_DRAFT, worker_pb2.WORKER_ROLE_TARGET)
# Cursor to the top; what is left of a line, and of the screen, is cleared.
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What the control plane reported at one moment."""

    at_s: float
    """Of this process's monotonic clock."""
    workers: list[control_pb2.WorkerStatus]
    activities: Mapping[tuple[str, str], trace_pb2.Activity]
    """By tenant and "", or "" and worker."""
    unreachable: list[str]
    decisions: Mapping[str, Sequence[policy_pb2.TenantDecision]]
    """By tenant, of those that are busiest."""


@click.command("top")
@click.option("--once", is_flag=True, help="Print once and end, as without a terminal.")
@click.option(
    "--interval",
    type=NumberRange(0.2, 60),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Time over which rates are measured.",
)
@control_options("table", "json", "yaml")
def top(once: bool, interval: float, control: str, output: str) -> None:
    """Show what tenants and workers do, live: rates over the last interval.

    VERIFIED/S: drafted tokens that targets verified; ACCEPTANCE: the share of them that was accepted. A request
    counts for the workers that it is on. A tenant has a line for drafts that draft workers make and one for those that
    the target makes itself (MADE-BY). MODE, TIMES-PLAIN (the speed with these drafts over that of plain decoding, with
    its 80 % interval) and PRICE (of a drafted token, in tokens) are the plan's; `outrider explain TENANT` has the
    reasons.
    """
    live = sys.stdout.isatty() and not once and output == "table"
    before = _sample(control)
    time.sleep(interval)
    if live:
        for now in repeated(lambda: _sample(control), interval, lambda problem: _draw([problem]), lambda: True):
            _draw(page(before, now))
            before = now
    now = _sample(control)
    note_unreachable(now.unreachable)
    body = {"tenants": tenant_rows(before, now), "workers": worker_rows(before, now)}
    emit("top", body, output, "\n".join(page(before, now)))


def _sample(control: str) -> LoadSample:
    async def ask(stub: Control) -> LoadSample:
        asked = control_pb2.ListActivitiesRequest()
        activities = await stub.ListActivities(asked)
        at_s = time.monotonic()
        workers = await stub.ListWorkers(control_pb2.ListWorkersRequest())
        by_name = {(one.tenant, one.worker_id): one for one in activities.activities}
        busiest = sorted((one for one in activities.activities if one.tenant), key=lambda one: -one.num_running)
        names = [one.tenant for one in busiest[:_EXPLAINED]]
        decisions = await asyncio.gather(*(_decisions(stub, name) for name in names))
        unreachable = list(activities.unreachable_routers)
        return LoadSample(at_s, list(workers.workers), by_name, unreachable, dict(zip(names, decisions, strict=True)))

    return ask_control(control, ask)


async def _decisions(stub: Control, tenant: str) -> Sequence[policy_pb2.TenantDecision]:
    """Nothing where nobody can say: another control plane leads, or may be asked by others only."""
    try:
        answer = await stub.Explain(control_pb2.ExplainRequest(tenant=tenant))
    except grpc.RpcError:
        return ()
    return answer.decisions


def page(before: LoadSample, now: LoadSample) -> list[str]:
    tenants, workers = tenant_rows(before, now), worker_rows(before, now)
    running = sum(row["running"] for row in tenants)
    requests = f"{running} request{'s' * (running != 1)} under way, {len(workers)} worker{'s' * (len(workers) != 1)}"
    missing = f"; no answer from {', '.join(now.unreachable)}" if now.unreachable else ""
    head = f"{time.strftime('%H:%M:%S')}  {requests}{missing}"
    shown = [line for row in tenants for line in _by_decision(row)]
    return [head, "", *table_lines(shown, _TENANTS), "", *table_lines(workers, _WORKERS)]


def _by_decision(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A tenant's lines: one for each decision, or one without any."""
    names = ("times_plain", "times_plain_interval")
    said = [speed_of(dict(zip(names, one, strict=True))) for one in zip(*map(row.get, names), strict=True)]
    decided = zip(row["made_by"], row["mode"], said, row["price"], strict=True)
    lines: Sequence[Sequence[object]] = list(decided) or [(None,) * 4]
    yield from (row | dict(zip(("made_by", "mode", "times_plain", "price"), one, strict=True)) for one in lines)


def tenant_rows(before: LoadSample, now: LoadSample) -> list[dict[str, Any]]:
    """Those that do most come first."""
    rows = [
        {
            "tenant": tenant,
            "running": one.num_running,
            **_rates(before, now, (tenant, "")),
            **_decided(now.decisions.get(tenant, ()), server_caps(now.workers, tenant)),
        }
        for (tenant, _), one in now.activities.items()
        if tenant
    ]
    return sorted(rows, key=lambda row: (-row["tokens_per_s"], -row["running"], row["tenant"]))


def _decided(decisions: Sequence[policy_pb2.TenantDecision], caps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One entry a target. `caps`: what servers allow the tenant."""
    rows = [under_servers(decision_row(decision), caps) for decision in decisions]
    return {
        "target": [row["target"] for row in rows],
        "mode": [row["mode"] for row in rows],
        "saving": [row["saving"] for row in rows],
        "made_by": [row["made_by"] for row in rows],
        "times_plain": [row["times_plain"] for row in rows],
        "times_plain_interval": [row["times_plain_interval"] for row in rows],
        "price": [row["price"] for row in rows],
    }


def worker_rows(before: LoadSample, now: LoadSample) -> list[dict[str, Any]]:
    """Targets, then drafts."""
    serving = [status for status in now.workers if status.info.role in _SERVING]
    return [_worker(before, now, status) for status in sorted(serving, key=lambda s: (-s.info.role, s.info.worker_id))]


def _worker(before: LoadSample, now: LoadSample, status: control_pb2.WorkerStatus) -> dict[str, Any]:
    row = worker_row(status)
    used = 1 - row["free_blocks"] / row["num_blocks"] if row["num_blocks"] else None
    return {
        "worker": row["id"],
        **{name: row[name] for name in ("role", "status", "running", "waiting")},
        "kv_use": None if used is None else f"{used:.0%}",
        **_rates(before, now, ("", row["id"])),
    }


def _rates(before: LoadSample, now: LoadSample, name: tuple[str, str]) -> dict[str, Any]:
    """Of one tenant or worker, between the two. What fell, as where a router has gone, counts as nothing."""
    nothing = trace_pb2.Activity()
    then, one = before.activities.get(name, nothing), now.activities.get(name, nothing)
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    verified = max(0, one.num_verified_tokens - then.num_verified_tokens)
    accepted = max(0, one.num_accepted_draft_tokens - then.num_accepted_draft_tokens)
    return {
        "requests_per_s": round(max(0, one.num_ended - then.num_ended) / elapsed_s, 1),
        "tokens_per_s": round(max(0, one.output_tokens - then.output_tokens) / elapsed_s, 1),
        "verified_per_s": round(verified / elapsed_s, 1),
        "acceptance": acceptance(verified, accepted),
    }


def _draw(lines: list[str]) -> None:
    shown = lines[: shutil.get_terminal_size().lines - 1]
    click.echo(_HOME + "".join(line + _CLEAR_LINE + "\n" for line in shown) + _CLEAR_BELOW, nl=False)
