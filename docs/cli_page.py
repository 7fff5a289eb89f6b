"""Writes docs/cli.md from the commands themselves: python docs/cli_page.py"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from outrider_controller.cli.app import cli
from outrider_controller.cli.exits import HELP

sys.path.insert(0, str(Path(__file__).parents[1]))
from loadtest.__main__ import loadtest

PAGE = Path(__file__).parent / "cli.md"
_HEAD = """# Commands

Every command of `outrider`, and the [load test](loadtest.md), as their `--help` has them. `python docs/cli_page.py`
writes this page. Do not edit it.
"""


def page() -> str:
    """The whole page."""
    context = click.Context(cli, info_name="outrider")
    parts = [_HEAD, _exit_codes()]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        parts += _command(f"outrider {name}", command, context)
    parts += _command("python -m loadtest", loadtest, click.Context(loadtest))
    return "\n".join(parts)


def _exit_codes() -> str:
    rows = re.findall(r"^  (\d+) +(.+)$", HELP, re.MULTILINE)
    return "\n".join(["| exit code | meaning |", "|---|---|", *(f"| {code} | {what} |" for code, what in rows), ""])


def _command(path: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    yield f"## {path}\n"
    if usage:
        yield f"`{path} {usage}`\n"
    yield _paragraphs(inspect.cleandoc(command.help or ""))
    if rows := [row for parameter in command.params if (row := _option(parameter, context))]:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows, ""])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _command(f"{path} {name}", found, context)


def _paragraphs(text: str) -> str:
    """Click's mark of lines that stay as they are becomes a block of text."""
    parts = []
    for part in text.split("\n\n"):
        kept = part.startswith("\b\n")
        parts.append(f"```text\n{part[2:]}\n```" if kept else part)
    return "\n\n".join(parts) + "\n"


def _option(parameter: click.Parameter, context: click.Context) -> str:
    record = parameter.get_help_record(context)
    if record is None or not isinstance(parameter, click.Option):
        return ""
    flags, meaning = (" ".join(part.split()).replace("|", r"\|") for part in record)
    return f"| `{flags}` | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page())
