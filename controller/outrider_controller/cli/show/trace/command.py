"""outrider trace"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from outrider.rpc.access.roles import Role
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, trace_pb2
from outrider.rpc.v1 import trace_pb2 as trace

from outrider_controller.cli.clusters.control import context_option, control_options, endpoint_option, operator_channel
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import colours, document, emit, json_file_option, write_json
from outrider_controller.cli.show.trace import asking, table
from outrider_controller.cli.show.trace.asking import request_id_of
from outrider_controller.cli.show.trace.rows import trace_row
from outrider_controller.cli.show.trace.tokens import TokenPainter, printable, token_ids

# As long as the control plane gives each router.
_TIMEOUT_S = 60.0
_KIND = "rounds"


@click.command("export")
@click.argument("requests", nargs=-1, metavar="[REQUEST]...")
@context_option
@endpoint_option("--control", "control", "OUTRIDER_CONTROL", "Control plane to ask")
@click.option("--tenant", default="", metavar="NAME", help="Of this tenant alone.")
@click.option("--model", default="", metavar="NAME", help="Of this model alone.")
@click.option("--tokens", is_flag=True, help="Token ids too, where routers record them.")
def export(requests: tuple[str, ...], control: str, tenant: str, model: str, tokens: bool) -> None:
    """Write the rounds of ended requests as JSON lines, one request a line.

    Of each round: its durations, and of each drafted token its source, the chance that the source gave it, and whether
    it was accepted. Without REQUEST: all that the routers remember. No text; `outrider plan --what-if` reads the lines.
    Exit code 3 when no router remembers a REQUEST as ended.
    """
    wanted = trace_pb2.ExportTracesRequest(
        tenant=tenant, model=model, request_ids=map(request_id_of, requests), tokens=tokens
    )
    asyncio.run(_write(control, wanted))


async def _write(control: str, wanted: trace_pb2.ExportTracesRequest) -> None:
    unknown = set(wanted.request_ids)
    async for row in exported(control, wanted):
        click.echo(json.dumps(document(_KIND, row)))
        unknown.discard(row["request_id"])
    if unknown:
        raise CommandError(f"no trace of an ended request: {', '.join(sorted(unknown))}", ExitCode.NOT_FOUND)


async def exported(control: str, wanted: trace_pb2.ExportTracesRequest) -> AsyncIterator[dict[str, Any]]:
    """A row for each request. Raises CommandError."""
    request = control_pb2.ControlServiceExportTracesRequest(filter=wanted)
    async with operator_channel(Role.CONTROL, control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        async for answer in stub.ExportTraces(request, timeout=_TIMEOUT_S):
            yield trace_row(answer.trace)


_POLL_S = 0.2
# A request's last round reaches the client before its call to the router has ended.
_SETTLE_S = 1.0


class _Showing(click.Group):
    """`outrider trace REQUEST` is `outrider trace show REQUEST`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, [*args] if known or not args else ["show", *args])


@click.group("trace", cls=_Showing)
def trace_group() -> None:
    """Show requests, round by round. `outrider trace REQUEST` is `outrider trace show REQUEST`."""


@trace_group.command("show")
@click.argument("request_id", metavar="REQUEST")
@control_options("text", "json")
@endpoint_option("--gateway", "grpc", "OUTRIDER_GATEWAY", "gRPC address of a gateway, for the text of tokens")
@click.option("--follow", "-f", is_flag=True, help="Continue until the request has ended.")
@json_file_option
def trace_command(
    request_id: str,
    control: str,
    grpc: str,
    follow: bool,
    output: str,
    json_file: Path | None,
) -> None:
    """Show what became of a request: one line a round.

    REQUEST is the id of an OpenAI answer, its x-request-id header, or the id of a gRPC answer. Each router remembers
    its last 1000 requests; exit code 3 when none of them knows this one.

    \b
    K          drafted tokens that the round verified
    ver, acc   positions verified, tokens accepted
    [s:text]   accepted, and drafted by the source s in the target itself; colours: by source
    stale      drafted tokens dropped since: late, or after a wrong guess
    wait       the target held the request back for a draft
    draft      drafting what was verified (d-queue: before that, in line)
    wire       messages on their way between workers, and the router
    queue      the target was busy with others
    verify     the step that verified, with its whole batch

    Draft and wire run in parallel with the target: what they cost is in wait.
    """
    colour = colours() and output == "text"
    parts = asyncio.run(show(request_id, control, grpc, colour=colour, follow=follow, quiet=output == "json"))
    body = {"traces": [trace_row(part) for part in parts]}
    if output == "json":
        emit("trace", body, output)
    write_json(json_file, "trace", body)


trace_group.add_command(export)


async def show(
    request_id: str, control: str, gateway: str, *, colour: bool, follow: bool = False, quiet: bool = False
) -> list[trace.RequestTrace]:
    """Prints the trace unless `quiet`, with `follow` as it comes; returns its parts. Raises CommandError."""
    asked, known, drawings = asking.request_id_of(request_id), asking.Dictionary(gateway), list[Drawing]()
    parts = await _settled(control, asked)
    while True:
        for number, part in enumerate(() if quiet else parts):
            painter = TokenPainter(await known.look_up(part.model, token_ids(part.rounds)), colour)
            if number == len(drawings):
                drawings.append(Drawing(table.Table(painter, None if follow else part.rounds)))
                _echo([*([""] if number else []), *drawings[number].head(part)])
            _echo(drawings[number].more(part, ended=not (follow and part.running)))
        if not (follow and any(part.running for part in parts)):
            return parts
        await asyncio.sleep(_POLL_S)
        parts = await asking.fetch(control, asked)


@dataclass(slots=True)
class Drawing:
    """One part of a request, as far as it is drawn."""

    rounds: table.Table
    num_rounds: int = 0
    num_items: int = 0
    """Rounds and events."""
    ended: bool = False

    def head(self, part: trace.RequestTrace) -> list[str]:
        return [*table.header(part), "", self.rounds.heading()]

    def more(self, part: trace.RequestTrace, *, ended: bool) -> list[str]:
        """What has come since. `ended`: no more will."""
        lines = []
        for item in table.interleaved(part, self.num_items):
            self.num_items += 1
            if isinstance(item, trace.RoundTrace):
                lines.append(self.rounds.line(self.num_rounds, item))
                self.num_rounds += 1
            else:
                lines.append(printable(table.event_line(item)))
        if ended and not self.ended:
            self.ended = True
            lines += [self.rounds.sums(part.rounds), "", *table.summary(part), table.LEGEND, self.rounds.legend]
        return lines


async def _settled(control: str, request_id: str) -> list[trace.RequestTrace]:
    """The parts; of a request that has just finished, without the last moment in which its call still ends."""
    give_up_s = asyncio.get_running_loop().time() + _SETTLE_S
    while True:
        parts = await asking.fetch(control, request_id)
        settling = any(part.running and part.finish_reason for part in parts)
        if not settling or asyncio.get_running_loop().time() > give_up_s:
            return parts
        await asyncio.sleep(_POLL_S / 10)


def _echo(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)
