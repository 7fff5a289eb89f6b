"""--watch: a list once, and then the rows that change, as they change. And what is asked again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click
import yaml

from outrider_controller.cli.clusters.control import control_options
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import document, note, print_rows, table_lines

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Row = dict[str, Any]
# What changes by itself, and is no news.
_AGES = {"age_ms", "seconds"}
_POLL_S = 2.0
# A control plane that stops cancels the calls under way.
_FOR_A_WHILE = (ExitCode.UNAVAILABLE, ExitCode.TIMEOUT, ExitCode.INTERRUPTED)


def list_options(command: F) -> F:
    """--watch, --context, --control and -o, for what `show_rows` shows."""
    explanation = "Keep printing changes until Ctrl-C; as JSON: one object a line."
    watch = click.option("-w", "--watch", is_flag=True, help=explanation)
    return watch(control_options("table", "wide", "json", "yaml", "name")(command))


def limit_option(most: int | None = None) -> Callable[[F], F]:
    """--limit, for lists that may be long."""
    kind = click.IntRange(1, most)
    return click.option("--limit", type=kind, default=1000, show_default=True, metavar="N", help="Most rows.")


def repeated(
    read: Callable[[], T],
    pause_s: float,
    report: Callable[[str], None] = note,
    begun: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """What `read` gives, until Ctrl-C. Reports once that nobody answers for a while.

    Raises CommandError for what no later attempt would mend, and where nothing was ever read, unless it has `begun`.
    """
    first, problem = True, ""
    while True:
        try:
            found, problem = read(), ""
        except CommandError as error:
            if (first and not begun()) or error.exit_code not in _FOR_A_WHILE:
                raise
            if str(error) != problem:
                report(problem := str(error))
        else:
            first = False
            yield found
        time.sleep(pause_s)


def show_rows(
    kind: str,
    read: Callable[[], Sequence[Row]],
    shown: Sequence[str],
    output: str,
    *,
    watch: bool,
    key: Sequence[str] = (),
) -> None:
    """What `read` gives, in the format asked for; with `watch` again and again. `kind` names the rows, too.

    `key`: the columns that tell one row from another; the first if empty.
    """
    if not watch:
        print_rows(kind, kind, read(), shown, output)
        return
    before: Sequence[Row] | None = None
    for now in repeated(read, _POLL_S):
        if before is not None:
            for line in changed_lines(before, now, shown, output, kind, key):
                click.echo(line)
        elif output in ("json", "yaml"):
            click.echo(_one_document(kind, now, output))
        else:
            print_rows(kind, kind, now, shown, output)
        before = now


def changed_lines(
    before: Sequence[Row],
    now: Sequence[Row],
    shown: Sequence[str],
    output: str,
    kind: str = "",
    key: Sequence[str] = (),
) -> list[str]:
    """The lines of rows that are new, differ in what is shown, or have gone; as JSON or YAML one document of them."""

    def name(row: Row) -> tuple[Any, ...]:
        return tuple(row[column] for column in key or shown[:1])

    def content(row: Row | None) -> list[Any] | None:
        columns: Iterable[str] = (row or ()) if output in ("json", "yaml") else shown
        return None if row is None else [row[column] for column in columns if column not in _AGES]

    known = {name(row): row for row in before}
    changed = [row for row in now if content(known.get(name(row))) != content(row)]
    gone = [{**known[left], "status": "gone"} for left in sorted(known.keys() - set(map(name, now)))]
    if output == "name":
        return [str(row[shown[0]]) for row in changed]
    if output in ("json", "yaml"):
        return [_one_document(kind, [*changed, *gone], output)] if changed or gone else []
    # Among all, so that they stand under the columns of the list.
    every = [*now, *(gone if "status" in shown else ())]
    lines = table_lines(every, shown)[1:]
    wanted = {id(row) for row in (*changed, *gone)}
    return [line for row, line in zip(every, lines, strict=True) if id(row) in wanted]


def _one_document(kind: str, rows: Sequence[Row], output: str) -> str:
    """One of many, on one line or after a mark."""
    body = document(kind, {kind: rows})
    if output == "json":
        return json.dumps(body, ensure_ascii=False)
    return "---\n" + yaml.safe_dump(body, sort_keys=False, allow_unicode=True).rstrip()
