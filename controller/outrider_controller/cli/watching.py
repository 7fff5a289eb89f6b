"""--watch: a list once, and then the rows that change, as they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import note, print_rows, table_lines

F = TypeVar("F", bound=Callable[..., Any])
Row = dict[str, Any]
# What changes by itself, and is no news.
_AGES = {"age_ms", "seconds"}
_POLL_S = 2.0
_FOR_A_WHILE = (ExitCode.UNAVAILABLE, ExitCode.TIMEOUT)


def watch_option(command: F) -> F:
    """-w/--watch"""
    return click.option("-w", "--watch", is_flag=True, help="Go on with what changes, until Ctrl-C.")(command)


def show_rows(kind: str, read: Callable[[], Sequence[Row]], shown: Sequence[str], output: str, *, watch: bool) -> None:
    """What `read` gives, in the format asked for; with `watch` again and again. `kind` names the rows, too."""
    if watch and output in ("json", "yaml"):
        raise click.UsageError(f"--watch tells rows as they change, which -o {output} does not show")
    rows = read()
    print_rows(kind, kind, rows, shown, output)
    problem = ""
    while watch:
        time.sleep(_POLL_S)
        try:
            found, problem = read(), ""
        except CommandError as error:
            if error.exit_code not in _FOR_A_WHILE:
                raise
            if str(error) != problem:
                problem = str(error)
                note(problem)
            continue
        for line in changed_lines(rows, found, shown, output):
            click.echo(line)
        rows = found


def changed_lines(before: Sequence[Row], now: Sequence[Row], shown: Sequence[str], output: str) -> list[str]:
    """The lines of rows that are new, differ in what is shown, or have gone."""
    name = shown[0]
    compared = [column for column in shown if column not in _AGES]
    known = {row[name]: row for row in before}
    changed = [row for row in now if not _alike(known.get(row[name]), row, compared)]
    left = known.keys() - {row[name] for row in now}
    gone = [{**known[key], "status": "gone"} for key in sorted(left) if "status" in known[key]]
    if output == "name":
        return [str(row[name]) for row in changed]
    # Among all, so that they stand under the columns of the list.
    every = [*now, *gone]
    lines = table_lines(every, shown)[1:]
    wanted = {id(row) for row in (*changed, *gone)}
    return [line for row, line in zip(every, lines, strict=True) if id(row) in wanted]


def _alike(before: Mapping[str, Any] | None, now: Mapping[str, Any], compared: Sequence[str]) -> bool:
    return before is not None and all(before[column] == now[column] for column in compared)
