"""The command tree, and what every command shares: errors, exit codes, interruption."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem
from outrider.extras import naming_extras

from outrider_controller.cli.exits import HELP, CommandError, ExitCode

_PACKAGE = "outrider_controller.cli"
# Name → (module, attribute, one line of help). The line stands here so that help imports no command.
_COMMANDS = {
    "up": (f"{_PACKAGE}.up.command", "up", "Start the whole stack on this machine; Ctrl-C stops all of it."),
    "demo": (f"{_PACKAGE}.ask.demo", "demo", "Answer a prompt twice, plain and with speculation, and compare."),
    "generate": (f"{_PACKAGE}.ask.generate", "generate", "Ask a running stack for an answer."),
    "verify": (f"{_PACKAGE}.ask.verify", "verify", "Repeat an answer without drafts, and compare it with its receipt."),
    "get": (f"{_PACKAGE}.show.get", "get", "List what is running."),
    "events": (f"{_PACKAGE}.show.events", "events", "Show what has happened, and with -w what happens."),
    "describe": (f"{_PACKAGE}.show.describe", "describe", "Show all that is known of a worker, tenant or key."),
    "top": (f"{_PACKAGE}.show.top", "top", "Show what tenants and workers do, live."),
    "cordon": (f"{_PACKAGE}.change.cordon", "cordon", "Send nothing new to a worker."),
    "uncordon": (f"{_PACKAGE}.change.cordon", "uncordon", "Send work to a worker again."),
    "drain": (f"{_PACKAGE}.change.cordon", "drain", "Empty a worker, so that it can be stopped."),
    "apply": (f"{_PACKAGE}.change.tenants", "apply", "Make or change the tenants that a file lists."),
    "set": (f"{_PACKAGE}.change.speculation", "set_group", "Change a tenant's speculation or quota."),
    "explain": (f"{_PACKAGE}.change.speculation", "explain", "Say why a tenant's requests speculate or not."),
    "rollout": (f"{_PACKAGE}.drafts.versions", "rollout_group", "Bring a draft's new version to requests."),
    "create": (f"{_PACKAGE}.change.tenants", "create", "Make an API key, certificates, or users of Redis."),
    "revoke": (f"{_PACKAGE}.change.tenants", "revoke", "Take an API key back."),
    "delete": (f"{_PACKAGE}.change.tenants", "delete", "Delete a tenant and its keys."),
    "config": (f"{_PACKAGE}.clusters.config", "config", "Name clusters, and choose the one that commands ask."),
    "trace": (f"{_PACKAGE}.show.trace.command", "trace_group", "Show what became of a request, round by round."),
    "plan": (f"{_PACKAGE}.drafts.plan", "plan_command", "Estimate what speculation brings, and the memory it needs."),
    "distill": (f"{_PACKAGE}.drafts.distill", "distill", "Make a draft: let a target teach a small model."),
    "compare": (f"{_PACKAGE}.drafts.compare", "compare_group", "Say which draft is worth most, on your prompts."),
    "draft": (f"{_PACKAGE}.foreground", "draft", "Run one draft worker in the foreground."),
    "target": (f"{_PACKAGE}.foreground", "target", "Run one target worker in the foreground."),
    "gateway": (f"{_PACKAGE}.foreground", "gateway", "Run one gateway in the foreground."),
    "controller": (f"{_PACKAGE}.foreground", "controller", "Run router and control plane in the foreground."),
    "completion": (f"{_PACKAGE}.completion", "completion", "Print a script that completes commands in a shell."),
    "version": (f"{_PACKAGE}.completion", "version_command", "Print the version."),
}


class LazyGroup(click.Group):
    """Imports a command when it is called. `table`: name → (module, attribute, one line of help)."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, attribute, _ = self._table[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        named = [(name, line) for name, (_, _, line) in self._table.items() if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=line) for name, line in named), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in self._table.items()])


@click.group(cls=LazyGroup, table=_COMMANDS, epilog=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="outrider", message="%(version)s")
def cli() -> None:
    """Exact, disaggregated speculative decoding.

    A target model answers; draft models on other machines propose its tokens. Start with `outrider demo`, or with
    `outrider up` here and `outrider generate "Why is the sky blue?"` in another terminal.
    """


def main(arguments: Sequence[str] | None = None, command: click.Command = cli, name: str = "outrider") -> None:
    """Entry point of the `outrider` command, and of others that end as it does."""
    # Read when grpc is imported. Without it, every child process started while a call is open costs a line on stderr.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    with naming_extras(name, "engine"):
        sys.exit(run(arguments, command, name))


def run(arguments: Sequence[str] | None = None, command: click.Command = cli, name: str = "outrider") -> int:
    """Runs one command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = command.main(args=given, prog_name=name, standalone_mode=False)
    except CommandError as error:
        return _failed(str(error), error.exit_code, error.reason, given)
    except click.UsageError as error:
        if not wants_json(given):
            error.show()
            return ExitCode.USAGE
        return _failed(error.format_message(), ExitCode.USAGE, "USAGE", given)
    except click.ClickException as error:
        return _failed(error.format_message(), ExitCode.ERROR, "ERROR", given)
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted", ExitCode.INTERRUPTED, "INTERRUPTED", given)
    except BrokenPipeError:
        # Who reads us has seen enough (`| head`). What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except UnicodeError as error:
        # Of an argument, stdin or a file: what servers send is UTF-8.
        return _failed(f"text that is not UTF-8: {error}", ExitCode.USAGE, "NOT_UTF8", given)
    except OSError as error:
        # Of a file or directory: what servers answer, or do not, has become a CommandError.
        return _failed(_plain(error), ExitCode.ERROR, "OS_ERROR", given)
    return result if isinstance(result, int) else ExitCode.OK


def _plain(error: OSError) -> str:
    where = error.filename if error.filename2 is None else error.filename2
    return f"{where}: {error.strerror}" if where is not None and error.strerror else str(error)


def _failed(message: str, code: ExitCode, reason: str, arguments: Sequence[str]) -> ExitCode:
    if wants_json(arguments):
        error = {"reason": reason, "message": message, "exit_code": int(code)}
        click.echo(json.dumps({"schema": "outrider/error/v1", "error": error}), err=True)
    else:
        click.echo(f"outrider: {message}", err=True)
    return code


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether the output asked for is JSON: then errors are, too."""
    pairs = set(itertools.pairwise(arguments))
    return bool(pairs & {("-o", "json"), ("--output", "json")} or {"-ojson", "--output=json"} & set(arguments))
