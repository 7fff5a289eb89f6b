"""outrider describe"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import grpc
from outrider.metadata.tenants.tenants import DEFAULT_TENANT
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2, tenants_pb2, usage_pb2

from outrider_controller.cli.asking import Nouns
from outrider_controller.cli.change.tenants import KEY_COLUMNS, all_keys, key_row, tenant_row
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.drafts import versions
from outrider_controller.cli.output import acceptance, cell, emit, moment, named, table_lines
from outrider_controller.cli.show.events import event_line, event_row
from outrider_controller.cli.show.sequences import COLUMNS, MOST, sequence_row
from outrider_controller.cli.show.trace.asking import request_id_of
from outrider_controller.cli.show.trace.rows import trace_row
from outrider_controller.cli.show.usage import BRIEF, shares, since_option, usage_row, usage_rows
from outrider_controller.control.api.rows import worker_row

_EVENTS = 10
_SEQUENCES = 10
# Of a trace, what says little of a request as a whole.
_LEFT_TO_TRACE = ("rounds", "events", "request_id", "started_unix_ms", "duration_ms")
_WORDS = {"gpu": "GPU", "gib": "(GiB)", "watts": "(W)", "ms": "(ms)", "s": "(s)", "id": "ID", "pid": "PID"}
_TABLES: dict[str, tuple[str, Sequence[str]]] = {
    "keys": ("Keys", KEY_COLUMNS),
    "hours": ("Hours", ("since", *BRIEF)),
    "moves": ("Events", ("at_ms", "event", "role", "worker", "reason", "position")),
}


@click.group("describe", cls=Nouns)
def describe() -> None:
    """Show all that is known of one worker, tenant, key or sequence, or of what a tenant has used."""


@describe.command("worker")
@click.argument("worker_id", metavar="ID")
@control_options("text", "json", "yaml")
def worker(worker_id: str, control: str, output: str) -> None:
    """Show a worker, what runs there, and what has happened to it."""

    async def ask(stub: Control) -> dict[str, Any]:
        status = (await stub.GetWorker(control_pb2.GetWorkerRequest(worker_id=worker_id))).worker
        return {
            "worker": {**worker_row(status), **_cordon(status)},
            **await _sequences(stub, worker_id=worker_id),
            "events": await _events(stub, worker_id=worker_id),
        }

    _show("worker", ask_control(control, ask), output)


@describe.command("tenant")
@click.argument("name")
@control_options("text", "json", "yaml")
def tenant(name: str, control: str, output: str) -> None:
    """Show a tenant, its keys, what it does, and what has happened to it."""

    async def ask(stub: Control) -> dict[str, Any]:
        record = await _tenant(stub, name)
        done = await stub.ListActivities(control_pb2.ListActivitiesRequest())
        activity = next((one for one in done.activities if one.tenant == name), None)
        return {
            "tenant": {**tenant_row(record), **(_activity(activity) if activity is not None else {})},
            "keys": [key_row(key) for key in await all_keys(stub, name)],
            **await _sequences(stub, tenant=name),
            "events": await _events(stub, tenant=name),
        }

    _show("tenant", ask_control(control, ask), output)


@describe.command("draft")
@click.argument("name")
@control_options("text", "json", "yaml")
def draft(name: str, control: str, output: str) -> None:
    """Show a version of a draft: how it was made, what is accepted of it, and its rollout."""
    found = versions.find(control, name)
    body: dict[str, Any] = {"draft": {**versions.draft_row(found), "recipe": found.recipe or None}}
    if found.HasField("rollout"):
        body["draft"] |= {f"rollout_{name}": value for name, value in versions.rollout_row(found.rollout).items()}
    _show("draft", body, output)


@describe.command("key")
@click.argument("key_id", metavar="ID")
@control_options("text", "json", "yaml")
def key(key_id: str, control: str, output: str) -> None:
    """Show an API key: whose it is, what it opens, and until when. Never the key."""

    async def ask(stub: Control) -> dict[str, Any]:
        [row] = named([key_id], "key", [key_row(one) for one in await all_keys(stub)])
        events = await _events(stub, tenant=row["tenant"])
        return {"key": row, "events": [event for event in events if event["fields"].get("key") == key_id]}

    _show("key", ask_control(control, ask), output)


@describe.command("sequence")
@click.argument("request_id", metavar="ID")
@control_options("text", "json", "yaml")
def sequence(request_id: str, control: str, output: str) -> None:
    """Show a request, under way or not: where it is open, how its drafts fare, and where it has been.

    Exit code 3 when no router remembers it. `outrider trace ID` shows its rounds.
    """
    asked = request_id_of(request_id)

    async def ask(stub: Control) -> dict[str, Any]:
        parts = (await stub.GetTrace(control_pb2.ControlServiceGetTraceRequest(request_id=asked))).traces
        listed = await stub.ListSequences(control_pb2.ListSequencesRequest(limit=MOST))
        rows = [trace_row(part) for part in parts]
        now = next((sequence_row(one) for one in listed.sequences if one.request_id == asked), {"id": asked})
        now = {**now, "started": moment(parts[0].started_unix_us / 1e6), "seconds": parts[-1].duration_us / 1e6}
        known = {name: value for name, value in rows[-1].items() if name not in _LEFT_TO_TRACE}
        return {"sequence": {**now, **known}, "moves": [event for row in rows for event in row["events"]]}

    _show("sequence", ask_control(control, ask), output)


@describe.command("usage")
@click.argument("tenant")
@since_option
@control_options("text", "json", "yaml")
def usage(tenant: str, since_s: int, control: str, output: str) -> None:
    """Show what a tenant has used: all figures of the bill, their shares, and the hours of the time asked for."""

    async def ask(stub: Control) -> dict[str, Any]:
        total = await usage_rows(stub, tenant, since_s, "total")
        if not total:
            await _tenant(stub, tenant)
        row = next((row for row in total if not row["server"]), usage_row(usage_pb2.UsageRow(tenant=tenant)))
        hours = [row for row in await usage_rows(stub, tenant, since_s, "hour") if not row["server"]]
        return {"usage": {**row, **shares(row)}, "hours": hours}

    _show("usage", ask_control(control, ask), output)


async def _tenant(stub: Control, name: str) -> tenants_pb2.Tenant:
    """The tenant of requests without a key needs no record."""
    try:
        return (await stub.GetTenant(control_pb2.GetTenantRequest(name=name))).tenant
    except grpc.RpcError as error:
        if name != DEFAULT_TENANT or from_rpc_error(error).reason != "UNKNOWN_TENANT":
            raise
        return tenants_pb2.Tenant(name=name)


async def _sequences(stub: Control, **of: str) -> dict[str, Any]:
    request = control_pb2.ListSequencesRequest(limit=_SEQUENCES, **of)
    found = await stub.ListSequences(request)
    return {"num_sequences": found.num_sequences, "sequences": [sequence_row(one) for one in found.sequences]}


async def _events(stub: Control, **of: str) -> list[dict[str, Any]]:
    request = control_pb2.WatchEventsRequest(last=_EVENTS, **of)  # type: ignore[arg-type]  # The names are fields.
    found = []
    async for response in stub.WatchEvents(request):
        found += [event_row(event) for event in response.events]
    return found


def _cordon(status: control_pb2.WorkerStatus) -> dict[str, Any]:
    cordon = status.cordon
    if not status.HasField("cordon"):
        return {}
    return {
        "cordoned_by": cordon.by,
        "cordoned_since": moment(cordon.since_unix_ms / 1000),
        "hand_over_at": moment(cordon.hand_over_unix_ms / 1000),
        "drained_at": moment(cordon.drained_unix_ms / 1000),
    }


def _activity(activity: Any) -> dict[str, Any]:
    """Since the routers started."""
    return {
        "running": activity.num_running,
        "ended": activity.num_ended,
        "output_tokens": activity.output_tokens,
        "verified_tokens": activity.num_verified_tokens,
        "acceptance": acceptance(activity.num_verified_tokens, activity.num_accepted_draft_tokens),
    }


def _show(kind: str, body: Mapping[str, Any], output: str) -> None:
    emit(f"{kind}-description", body, output, "\n".join(_lines(kind, body)) if output == "text" else "")


def _lines(kind: str, body: Mapping[str, Any]) -> Iterator[str]:
    fields = {_label(name): value for name, value in body[kind].items()}
    width = max(map(len, fields)) + 1
    yield from (f"{label + ':':<{width}}  {cell(value)}" for label, value in fields.items())
    for name, (title, shown) in _TABLES.items():
        if rows := body.get(name):
            yield from _table(f"{title}:", rows, shown)
    if "sequences" in body:
        shown_here, total = len(body["sequences"]), body["num_sequences"]
        title = f"Sequences: {total}" + (f", the {shown_here} oldest" if shown_here < total else "")
        yield from _table(title, body["sequences"], COLUMNS)
    if "events" in body:
        yield "Events:" if body["events"] else "Events: none"
        yield from (f"  {event_line(event)}" for event in body["events"])


def _label(name: str) -> str:
    words = " ".join(_WORDS.get(word, word) for word in name.split("_"))
    return words[0].upper() + words[1:]


def _table(title: str, rows: list[dict[str, Any]], shown: Sequence[str]) -> Iterator[str]:
    yield title
    yield from (f"  {line}" for line in (table_lines(rows, shown) if rows else ()))
