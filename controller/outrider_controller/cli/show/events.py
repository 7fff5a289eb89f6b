"""outrider events"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
from outrider.metadata.events import MAX_EVENTS, EventKind
from outrider.rpc.v1 import control_pb2

from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.output import document, emit, moment
from outrider_controller.cli.watching import repeated

_PAUSE_S = 1.0


@click.command("events")
@click.option("-w", "--watch", is_flag=True, help="Keep printing new ones until Ctrl-C.")
@click.option(
    "-n", "--limit", type=click.IntRange(0, MAX_EVENTS), default=100, show_default=True, help="The last so many."
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([kind.value for kind in EventKind]),
    metavar="KIND",
    help="May be repeated.",
)
@click.option("--worker", default="", metavar="ID", help="Only about this one.")
@click.option("--tenant", default="", metavar="NAME", help="Only about this one.")
@control_options("table", "json")
def events(
    watch: bool, limit: int, kinds: tuple[str, ...], worker: str, tenant: str, control: str, output: str
) -> None:
    """Show what has happened: workers that came and went, failovers, alerts, changes of tenants.

    One line an event, the oldest first. As JSON with --watch: one object a line.
    """
    request = control_pb2.WatchEventsRequest(last=limit, follow=watch, kinds=kinds, worker_id=worker, tenant=tenant)
    found: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        if output == "json" and not watch:
            found.append(row)
        else:
            click.echo(event_line(row) if output == "table" else json.dumps(document("event", row)))

    tail = Tail(request, show)
    if watch:
        tail.keep_reading(lambda: ask_control(control, tail.read))
    ask_control(control, tail.read)
    if output == "json":
        emit("events", {"events": found}, output)


@dataclass(slots=True)
class Tail:
    """Reads events, and knows where it was when the control plane went away."""

    request: control_pb2.WatchEventsRequest
    show: Callable[[dict[str, Any]], None]
    connected: bool = False

    async def read(self, stub: Control) -> None:
        async for response in stub.WatchEvents(self.request, timeout=None):
            self.connected = True
            for event in response.events:
                self.request.since = event.id
                self.show(event_row(event))

    def keep_reading(self, read: Callable[[], None], pause_s: float = _PAUSE_S) -> None:
        """Until Ctrl-C. Raises CommandError for what no later attempt would mend, and where it never was connected."""
        for _ in repeated(read, pause_s, begun=lambda: self.connected):
            pass


def event_row(event: control_pb2.Event) -> dict[str, Any]:
    return {"id": event.id, "time": moment(event.unix_ms / 1000), "kind": event.kind, "fields": dict(event.fields)}


def event_line(row: Mapping[str, Any]) -> str:
    fields = " ".join(f"{name}={_quoted(row['fields'][name])}" for name in _ordered(row["fields"]))
    return f"{row['time']}  {row['kind']:<20}  {fields}"


def _ordered(fields: Any) -> list[str]:
    """Whom it is about comes first."""
    first = ("worker_id", "tenant", "alert")
    return sorted(fields, key=lambda name: (first.index(name) if name in first else len(first), name))


def _quoted(value: str) -> str:
    """On one line, without anything a terminal would obey."""
    return value if value.isprintable() and " " not in value and value else json.dumps(value)
