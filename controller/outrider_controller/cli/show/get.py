"""outrider get"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from outrider.rpc.v1 import control_pb2, tenants_pb2, worker_pb2

from outrider_controller.cli.asking import Nouns
from outrider_controller.cli.change.tenants import get_keys, get_tenants, paged
from outrider_controller.cli.clusters.config import list_contexts
from outrider_controller.cli.clusters.control import ask_control, control_options, list_workers
from outrider_controller.cli.drafts.versions import get_drafts
from outrider_controller.cli.output import moment, named, note, print_rows
from outrider_controller.cli.show.sequences import get_sequences
from outrider_controller.cli.show.usage import get_usage
from outrider_controller.cli.watching import list_options, show_rows
from outrider_controller.control.api.rows import worker_rows

_ROLES = [name.removeprefix("WORKER_ROLE_").lower() for name, value in worker_pb2.WorkerRole.items() if value]
_TABLE = ("id", "role", "status", "model", "address", "running", "waiting")
_LIMITS = ("num_blocks", "max_sequences", "max_context_len")
_GPU = ("device_name", "gpu_memory_gib", "gpu_used_gib", "gpu_utilization", "gpu_power_watts")
_KIND = ("engine", "draft_kind")
_WIDE = (*_TABLE, "free_blocks", "age_ms", "reason", *_KIND, "pid", *_LIMITS, "device", *_GPU, "dtype", "version")


@click.group("get", cls=Nouns)
def get() -> None:
    """List what is running."""


@get.command("workers")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--role", type=click.Choice(sorted(_ROLES)), help="Only these.")
@list_options
def workers(ids: tuple[str, ...], role: str | None, watch: bool, control: str, output: str) -> None:
    """List workers that hold a lease: drafts, targets, routers, gateways.

    A draft that no target can use is `unpaired`, and a line says why. What has a lease that cannot be a worker's is
    `refused`, and counts for nothing. A target that takes its requests itself, such as `vllm serve` with the plugin, is
    `attached`.

    With IDs only those; exit code 3 if one of them does not exist.
    """

    def read() -> list[dict[str, Any]]:
        # All of them: whether a draft is paired depends on the targets.
        answer = asyncio.run(list_workers(control, worker_pb2.WORKER_ROLE_UNSPECIFIED))
        if not answer.metadata_available:
            note("the metadata store is away: this is the last known list")
        rows = [row for row in worker_rows(answer.workers) if role in (None, row["role"])]
        for row in rows:
            if row["status"] == "unpaired":
                note(row["reason"])
            if row["status"] == "refused":
                note(f"{row['id']}: {row['reason']}")
        return named(ids, "worker", rows)

    show_rows("workers", read, _WIDE if output == "wide" else _TABLE, output, watch=watch)


get.add_command(list_contexts, "contexts")

_AUDIT = ("at", "by", "action", "name", "change")


@click.command("audit")
@click.argument("name", default="", metavar="[NAME]")
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, metavar="N", help="Of the last changes."
)
@control_options("table", "wide", "json", "yaml")
def get_audit(name: str, limit: int, control: str, output: str) -> None:
    """What operators have changed, the newest first: who, when, and what it was before.

    With NAME only changes of that tenant or worker.
    """
    request = control_pb2.ListAuditRequest()
    found, _ = ask_control(control, lambda stub: paged(stub.ListAudit, request, "entries", limit, name))
    rows = [audit_row(entry) for entry in found]
    print_rows("audit", "audit", rows, (*_AUDIT, "id") if output == "wide" else _AUDIT, output)


_ERASURES = ("tenant", "what", "ordered", "pending")


@click.command("erasures")
@control_options("table", "json", "yaml")
def get_erasures(control: str, output: str) -> None:
    """What was ordered to be erased, and which workers and volumes have not erased it yet."""
    found = ask_control(control, lambda stub: stub.ListErasures(control_pb2.ListErasuresRequest()))
    rows = [
        {
            "tenant": one.tenant,
            "what": "samples" if one.samples else "history",
            "ordered": moment(one.ordered_unix_us / 1e6),
            "pending": list(one.pending),
        }
        for one in found.erasures
    ]
    print_rows("erasures", "erasures", rows, _ERASURES, output)


def audit_row(entry: control_pb2.AuditEntry) -> dict[str, Any]:
    return {
        "at": moment(entry.at_unix_ms / 1000),
        "by": entry.by,
        "action": entry.action,
        "name": entry.name,
        "change": ", ".join(
            [*_differences(entry), *(f"{name} {value}" for name, value in sorted(entry.details.items()))]
        ),
        "id": entry.id,
        "details": dict(entry.details),
        "old": _record(entry.old) if entry.HasField("old") else None,
        "new": _record(entry.new) if entry.HasField("new") else None,
    }


def _record(tenant: tenants_pb2.Tenant) -> dict[str, Any]:
    return MessageToDict(tenant, preserving_proto_field_name=True)


def _differences(entry: control_pb2.AuditEntry) -> Iterator[str]:
    """Field by field, where a record was changed. Of a new or deleted one only the consent to samples."""
    old, new = (dict(_flat("", _record(one))) for one in (entry.old, entry.new))
    changed = entry.HasField("old") and entry.HasField("new")
    for name in sorted({*old, *new}) if changed else ("samples",):
        if old.get(name) != new.get(name):
            yield f"{name} {old.get(name, '-')} → {new.get(name, '-')}"


def _flat(prefix: str, record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


get.add_command(get_sequences)
get.add_command(get_tenants)
get.add_command(get_drafts)
get.add_command(get_keys)
get.add_command(get_usage)
get.add_command(get_audit)
get.add_command(get_erasures)
