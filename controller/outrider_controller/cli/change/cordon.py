"""outrider cordon, uncordon and drain"""

from __future__ import annotations

import asyncio

import click
import grpc
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2

from outrider_controller.cli.asking import DAY_S, span_option
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import emit, note
from outrider_controller.control.api.rows import worker_row

_POLL_S = 0.5
_reason_option = click.option("--reason", default="", metavar="TEXT", help="Why, for whoever looks at the worker.")


@click.command("cordon")
@click.argument("worker_id", metavar="WORKER")
@_reason_option
@control_options("text", "json", "yaml")
def cordon(worker_id: str, reason: str, control: str, output: str) -> None:
    """Send nothing new to a draft, target or router. What runs there continues.

    Holds until `outrider uncordon`, even if other processes restart. A worker that is restarted is a new worker,
    without the cordon.
    """
    request = control_pb2.CordonWorkerRequest(worker_id=worker_id, reason=reason)
    status = ask_control(control, lambda stub: stub.CordonWorker(request)).worker
    emit("worker", {"worker": worker_row(status)}, output, f"{worker_id} is cordoned; {_left(status)}")


@click.command("uncordon")
@click.argument("worker_id", metavar="WORKER")
@control_options("text", "json", "yaml")
def uncordon(worker_id: str, control: str, output: str) -> None:
    """Take `cordon` or `drain` back: the worker is sent work again."""
    request = control_pb2.UncordonWorkerRequest(worker_id=worker_id)
    was_cordoned = ask_control(control, lambda stub: stub.UncordonWorker(request)).was_cordoned
    line = f"{worker_id} takes work again" if was_cordoned else f"{worker_id} was not cordoned"
    emit("worker", {"id": worker_id, "was_cordoned": was_cordoned}, output, line)


@click.command("drain")
@click.argument("worker_id", metavar="WORKER")
@_reason_option
@span_option("--grace", "grace_s", "30s", "How long sequences may finish on a target first.", most_s=DAY_S)
@span_option("--timeout", "timeout_s", "10m", "How long to wait; exit code 6 after that.", most_s=DAY_S)
@click.option("--no-wait", is_flag=True, help="Return at once; `outrider get workers` says when it is drained.")
@control_options("text", "json", "yaml")
def drain(worker_id: str, reason: str, grace_s: int, timeout_s: int, no_wait: bool, control: str, output: str) -> None:
    """Empty a draft, target or router, so that it can be stopped: cordon it and wait until nothing runs there.

    Requests leave a draft at once, and a target after --grace where another target can go on with them; clients see
    nothing of it. A router finishes what it has. Ctrl-C ends the wait, not the drain.
    """
    request = control_pb2.DrainWorkerRequest(worker_id=worker_id, reason=reason, grace_s=grace_s)

    async def ask(stub: Control) -> control_pb2.WorkerStatus | None:
        status = (await stub.DrainWorker(request)).worker
        return status if no_wait else await _until_drained(stub, worker_id, timeout_s)

    status = ask_control(control, ask)
    if status is None:
        emit("worker", {"id": worker_id, "left": True}, output, f"{worker_id} has left")
        return
    now = f"being drained; {_left(status)}" if no_wait else "drained: stop it, or uncordon it"
    emit("worker", {"worker": worker_row(status)}, output, f"{worker_id} is {now}")


async def _until_drained(stub: Control, worker_id: str, timeout_s: float) -> control_pb2.WorkerStatus | None:
    """None when it has left meanwhile. Raises CommandError."""
    loop = asyncio.get_running_loop()
    give_up_s, reported = loop.time() + timeout_s, ""
    while True:
        try:
            status = (await stub.GetWorker(control_pb2.GetWorkerRequest(worker_id=worker_id))).worker
        except grpc.RpcError as error:
            if from_rpc_error(error).reason == "UNKNOWN_WORKER":
                return None
            raise
        if status.cordon.drained_unix_ms:
            return status
        if not status.HasField("cordon"):
            raise CommandError(f"somebody took the drain of {worker_id} back", ExitCode.CONFLICT)
        if loop.time() >= give_up_s:
            raise CommandError(f"{worker_id} is not drained yet: {_left(status)}", ExitCode.TIMEOUT)
        if (left := _left(status)) != reported:
            reported = left
            note(f"{worker_id}: {left}")
        await asyncio.sleep(_POLL_S)


def _left(status: control_pb2.WorkerStatus) -> str:
    count = max(status.load.num_sequences, status.load.num_running + status.load.num_waiting)
    return f"{count or 'no'} sequence{'s' * (count != 1)} there"
