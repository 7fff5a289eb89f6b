"""outrider get audit"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from outrider.rpc.v1 import control_pb2, tenants_pb2

from outrider_controller.cli.change.tenants import paged
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.output import moment, print_rows

_TABLE = ("at", "by", "action", "name", "change")


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

    def ask(stub: Control, **page: Any) -> Awaitable[control_pb2.ListAuditResponse]:
        return stub.ListAudit(control_pb2.ListAuditRequest(**page))

    found, _ = ask_control(control, lambda stub: paged(lambda **page: ask(stub, **page), "entries", limit))
    rows = [audit_row(entry) for entry in found if name in ("", entry.name)]
    print_rows("audit", "audit", rows, (*_TABLE, "id") if output == "wide" else _TABLE, output)


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
