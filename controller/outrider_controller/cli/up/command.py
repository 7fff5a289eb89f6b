"""outrider up"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from outrider.configuration import ConfigError, read_mapping
from outrider.masking import masked
from outrider.protocol.receipts import ReceiptKey
from outrider.rpc.access.roles import ClusterSecret, Role
from outrider.user_cache import private_directory, state_directory, write_whole

from outrider_controller.cli.clusters import contexts
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, emit, note, output_option
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async, stack_options
from outrider_controller.cli.up.supervisor import Supervisor
from outrider_controller.control.api.rows import worker_rows


def options_from_file(context: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    """Makes what the file says the defaults of the command. Raises UsageError that names the file and the option."""
    if file is None:
        return
    options = context.command.params
    names = {name.lstrip("-").replace("-", "_"): option.name for option in options for name in option.opts}
    try:
        given = read_mapping(file)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    for name in given:
        if name not in names or names[name] == parameter.name:
            raise click.UsageError(f"{name}: is not an option ({file})")
    context.default_map = {str(names[name]): value for name, value in given.items()}


_ACTORS = ("router", "control")


@click.command("up", context_settings={"auto_envvar_prefix": "OUTRIDER_UP"})
@stack_options(pin=False, borrow_cores=True, trace_tokens=True)
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="OpenAI API; 0: any.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="gRPC API; 0: any.")
@click.option("--control-port", type=click.IntRange(0, 65535), default=8002, show_default=True, help="Control; 0: any.")
@click.option("--restart/--no-restart", default=True, show_default=True, help="Restart a process that dies.")
@click.option(
    "--context",
    callback=contexts.check_name,
    default="",
    metavar="NAME",
    help=f"Name of this stack for other commands; default: {contexts.DEFAULT}, with a number if that is taken.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=options_from_file,
    help="YAML file with options. The environment (OUTRIDER_UP_OPTION) and the command line override it.",
)
@click.option("--check-config", is_flag=True, help="Only check the options, and print those of the stack.")
@output_option("text", "json")
def up(
    config: StackConfig,
    restart: bool,
    context: str,
    check_config: bool,
    output: str,
) -> int:
    """Start the whole stack on this machine; Ctrl-C stops all of it.

    Redis, target and draft workers, router and control plane under Ray, and the gateway: each is a process of its own
    with a log of its own. Prints them with their ports, and requests to try. With -o json the same as one object, once
    everything is ready.

    A process that dies is started again, at once the first time, and a little later each time it dies soon after.

    Exit code 0 after Ctrl-C or SIGTERM; 1 with the end of the log when a process does not start, or dies with
    --no-restart; 130 when interrupted before everything was up.
    """
    if check_config:
        click.echo(json.dumps(masked(config), indent=2))
        return ExitCode.OK
    return run_async(_up(config, restart, context, output))


async def _up(config: StackConfig, restart: bool, wanted: str, output: str) -> int:
    async with contextlib.AsyncExitStack() as exits:
        name = exits.enter_context(contexts.claimed(wanted))
        config, token_file = _with_state(config, name)
        stack = await exits.enter_async_context(Stack(config, note))
        contexts.publish(name, stack.endpoints, token_file)
        rows = await process_rows(stack)
        body = {"context": name, **stack.endpoints, "run_dir": str(stack.run_dir), "processes": rows}
        first = _first_requests(stack, name, token_file.read_text().strip())
        text = f"\n{process_table(rows)}\n\n{first}\n\nCtrl-C stops everything."
        emit("up", body, output, text)
        try:
            await (_supervise(stack) if restart else _until_one_dies(stack))
        except asyncio.CancelledError:
            note("stopping")
            # The wanted end of this command: from here on it is no longer being cancelled.
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
    note("stopped")
    return ExitCode.OK


def _with_state(config: StackConfig, name: str) -> tuple[StackConfig, Path]:
    """The stack of this name with what it keeps over a restart, and the file with its operator's token."""
    try:
        state_dir = private_directory(private_directory(state_directory()) / name)
        secret_file, token_file = state_dir / "cluster-secret", state_dir / "operator-token"
        receipt_key_file = state_dir / "receipt-key.pem"
        if not secret_file.exists():
            write_whole(secret_file, secrets.token_hex(32))
        if not receipt_key_file.exists():
            write_whole(receipt_key_file, ReceiptKey.make().pem)
        write_whole(token_file, ClusterSecret.read(secret_file).token(Role.OPERATOR))
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    kept = replace(config, state_dir=state_dir, secret_file=secret_file, receipt_key_file=receipt_key_file)
    return kept, token_file


async def _supervise(stack: Stack) -> None:
    await Supervisor(stack.processes, stack.relaunch, note, stack.config.start_timeout_s).run()


async def _until_one_dies(stack: Stack) -> None:
    """Raises ProcessFailed."""
    raise (await stack.first_failure()).failure()


async def process_rows(stack: Stack) -> list[dict[str, Any]]:
    """Every process of the stack: its name, pid and addresses. Routers and control plane are actors of Ray."""
    rows: list[dict[str, Any]] = []
    for process in stack.processes.values():
        spec = process.spec
        address = ", ".join([spec.address, *(f"{what} {where}" for what, where in spec.endpoints.items())])
        actors = spec.name == "controller"
        rows.append({"process": spec.name, "pid": process.pid, "address": "-" if actors else address})
        if actors:
            rows += [_actor_row(stack, row) for row in worker_rows(await stack.workers()) if row["role"] in _ACTORS]
    return rows


def _actor_row(stack: Stack, row: Mapping[str, Any]) -> dict[str, Any]:
    address = row["address"]
    name = f"router-{stack.routers.index(address)}" if address in stack.routers else row["role"]
    where = f"{address}, ops {stack.ops[name]}" if name in stack.ops else address
    return {"process": f"  {row['role']} (Ray actor)", "pid": row["pid"], "address": where}


def process_table(rows: list[dict[str, Any]]) -> str:
    return columns(["PROCESS", "PID", "ADDRESS"], [[row["process"], row["pid"], row["address"]] for row in rows])


_TOKENS_KEPT = """
Routers keep the tokens of answers for `outrider trace`; --no-trace-tokens has them keep counts and times alone."""


def _first_requests(stack: Stack, context: str, token: str) -> str:
    model = stack.config.model
    named = "" if context == contexts.DEFAULT else f" --context {context}"
    return f"""\
Ask it:

  curl http://{stack.gateway_http}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{model}", "max_tokens": 64, "temperature": 0, "include_metrics": true,
    "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

  grpcurl -plaintext -d '{{"model": "{model}", "chat": {{"messages": [{{"role": "user",
    "content": "Why is the sky blue?"}}]}}, "options": {{"max_tokens": 64}}}}' \\
    {stack.gateway_grpc} outrider.rpc.v1.GenerationService/Generate

  outrider generate{named} "Why is the sky blue?"
  outrider get workers{named}

Console: http://{stack.ops["control"]}/console#token={token}
Logs: {stack.run_dir}
Every process answers at its ops address: /livez, /readyz, /metrics and /configz. For Prometheus (file_sd_configs):
{stack.scrape_file}{_TOKENS_KEPT if stack.config.trace_tokens else ""}"""
