"""outrider trace export"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import click
from outrider.rpc.access.roles import Role
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, trace_pb2

from outrider_controller.cli.clusters.control import operator_channel
from outrider_controller.cli.clusters.endpoints import context_option, endpoint_option
from outrider_controller.cli.output import document
from outrider_controller.cli.show.trace.asking import request_id_of
from outrider_controller.cli.show.trace.rows import trace_row

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
    """
    wanted = trace_pb2.ExportTracesRequest(
        tenant=tenant, model=model, request_ids=map(request_id_of, requests), tokens=tokens
    )
    asyncio.run(_write(control, wanted))


async def _write(control: str, wanted: trace_pb2.ExportTracesRequest) -> None:
    async for line in exported(control, wanted):
        click.echo(line)


async def exported(control: str, wanted: trace_pb2.ExportTracesRequest) -> AsyncIterator[str]:
    """A line for each request. Raises CommandError."""
    request = control_pb2.ControlServiceExportTracesRequest(filter=wanted)
    async with operator_channel(Role.CONTROL, control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        async for answer in stub.ExportTraces(request, timeout=_TIMEOUT_S):
            yield json.dumps(document(_KIND, trace_row(answer.trace)))
