"""outrider describe"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import grpc
from outrider.metadata.tenants import DEFAULT_TENANT
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2, tenants_pb2

from outrider_controller.cli.control import Control, ask_control, control_option
from outrider_controller.cli.events import event_line, event_row
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import cell, emit_json, moment, output_option, table_lines
from outrider_controller.cli.sequences import COLUMNS, acceptance, sequence_row
from outrider_controller.cli.tenants import KEY_COLUMNS, all_keys, key_row, tenant_row
from outrider_controller.control.rows import worker_row

_EVENTS = 10
_SEQUENCES = 10


@click.group("describe")
def describe() -> None:
    """Show all that is known of one worker, tenant or key."""


@describe.command("worker")
@click.argument("worker_id", metavar="ID")
@control_option
@output_option("text", "json")
def worker(worker_id: str, control: str, output: str) -> None:
    """Show a worker, what runs there, and what has happened to it."""

    async def ask(stub: Control) -> dict[str, Any]:
        one = control_pb2.GetWorkerRequest(worker_id=worker_id)
        status = (await stub.GetWorker(one)).worker
        listed = control_pb2.ListSequencesRequest(limit=_SEQUENCES, worker_id=worker_id)
        open_there = await stub.ListSequences(listed)
        return {
            "worker": {**worker_row(status), **_cordon(status)},
            "num_sequences": open_there.num_sequences,
            "sequences": [sequence_row(sequence) for sequence in open_there.sequences],
            "events": await _events(stub, worker_id=worker_id),
        }

    _show("worker", ask_control(control, ask), output)


@describe.command("tenant")
@click.argument("name")
@control_option
@output_option("text", "json")
def tenant(name: str, control: str, output: str) -> None:
    """Show a tenant, its keys, what it does, and what has happened to it."""

    async def ask(stub: Control) -> dict[str, Any]:
        record = await _tenant(stub, name)
        listed = control_pb2.ListSequencesRequest(limit=_SEQUENCES, tenant=name)
        under_way = await stub.ListSequences(listed)
        done = await stub.ListActivities(control_pb2.ListActivitiesRequest())
        activity = next((one for one in done.activities if one.tenant == name), None)
        return {
            "tenant": {**tenant_row(record), **(_activity(activity) if activity is not None else {})},
            "keys": [key_row(key) for key in await all_keys(stub, name)],
            "num_sequences": under_way.num_sequences,
            "sequences": [sequence_row(sequence) for sequence in under_way.sequences],
            "events": await _events(stub, tenant=name),
        }

    _show("tenant", ask_control(control, ask), output)


@describe.command("key")
@click.argument("key_id", metavar="ID")
@control_option
@output_option("text", "json")
def key(key_id: str, control: str, output: str) -> None:
    """Show an API key: whose it is, what it opens, and until when. Never the key."""

    async def ask(stub: Control) -> dict[str, Any]:
        found: list[tenants_pb2.ApiKey] = [one for one in await all_keys(stub) if one.id == key_id]
        if not found:
            raise CommandError(f"no key {key_id}", ExitCode.NOT_FOUND, reason="UNKNOWN_KEY")
        events = await _events(stub, tenant=found[0].tenant)
        return {"key": key_row(found[0]), "events": [event for event in events if event["fields"].get("key") == key_id]}

    _show("key", ask_control(control, ask), output)


async def _tenant(stub: Control, name: str) -> tenants_pb2.Tenant:
    """The tenant of requests without a key needs no record."""
    try:
        return (await stub.GetTenant(control_pb2.GetTenantRequest(name=name))).tenant
    except grpc.RpcError as error:
        if name != DEFAULT_TENANT or from_rpc_error(error).reason != "UNKNOWN_TENANT":
            raise
        return tenants_pb2.Tenant(name=name)


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
    if output == "json":
        emit_json(f"{kind}-description", body)
        return
    _print_fields(body[kind])
    if keys := body.get("keys"):
        _print_table("Keys", keys, KEY_COLUMNS)
    if "sequences" in body:
        shown, total = len(body["sequences"]), body["num_sequences"]
        title = f"Sequences: {total}" + (f", the {shown} oldest" if shown < total else "")
        _print_table(title, body["sequences"], COLUMNS)
    click.echo("Events:" if body["events"] else "Events: none")
    for event in body["events"]:
        click.echo(f"  {event_line(event)}")


def _print_fields(fields: Mapping[str, Any]) -> None:
    width = max(map(len, fields)) + 1
    for name, value in fields.items():
        label = f"{name.replace('_', ' ').capitalize()}:"
        click.echo(f"{label:<{width}}  {cell(value)}")


def _print_table(title: str, rows: list[dict[str, Any]], shown: tuple[str, ...]) -> None:
    click.echo(title)
    for line in table_lines(rows, shown) if rows else ():
        click.echo(f"  {line}")
