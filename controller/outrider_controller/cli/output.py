"""How results look: aligned columns for people, versioned JSON for programs, on stdout."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from outrider_controller.cli.exits import CommandError, ExitCode

F = TypeVar("F", bound=Callable[..., Any])
Row = dict[str, Any]
_RATES = {"_per_second": "/s", "_per_minute": "/min", "_per_s": "/s"}


def output_option(*choices: str) -> Callable[[F], F]:
    """-o/--output; the first choice is the default."""
    return click.option(
        "-o", "--output", type=click.Choice(choices), default=choices[0], show_default=True, help="Format of stdout."
    )


def json_file_option(command: F) -> F:
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option("--json", "json_file", type=kind, metavar="FILE", help="Also write the figures here.")(command)


def document(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the name and version of its shape."""
    return {"schema": f"outrider/{kind}/v1", **body}


def emit(kind: str, body: Mapping[str, Any], output: str, text: str = "") -> None:
    """A result in the format asked for; people read the text."""
    if output == "yaml":
        click.echo(yaml.safe_dump(document(kind, body), sort_keys=False, allow_unicode=True), nl=False)
    else:
        click.echo(_json(kind, body) if output == "json" else text)


def _json(kind: str, body: Mapping[str, Any]) -> str:
    return json.dumps(document(kind, body), ensure_ascii=False, indent=2)


def write_json(file: Path | None, kind: str, body: Mapping[str, Any]) -> None:
    """Does nothing without a file."""
    if file is not None:
        file.write_text(_json(kind, body) + "\n")


def columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns: numbers, and strings that begin with one, to the right."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [bool(rows) and all(_numeric(cell) for cell in column) for column in zip(*lines[1:], strict=True)]
    right = right or [False] * len(header)

    def align(cell: str, width: int, to_right: bool) -> str:
        return cell.rjust(width) if to_right else cell.ljust(width)

    return "\n".join("  ".join(map(align, line, widths, right)).rstrip() for line in lines)


def _numeric(cell: str) -> bool:
    return cell in ("", "-") or bool(re.fullmatch(r"[+-]?\d+([.,]\d+)*( ?(%|×|ms|s|/ \d+))?", cell))


def note(line: str) -> None:
    """One line of diagnostics on stderr."""
    click.echo(line, err=True)


def colours() -> bool:
    """Whether stdout may be coloured: a terminal, and nobody set NO_COLOR (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def moment(unix_s: float) -> str | None:
    """In UTC, to the second; None for 0."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z") if unix_s else None


def acceptance(num_verified: int, num_accepted: int) -> float | None:
    """Accepted of the drafted tokens that were verified; None where none were."""
    return round(num_accepted / num_verified, 3) if num_verified else None


def print_rows(kind: str, name: str, rows: Sequence[Mapping[str, Any]], shown: Sequence[str], output: str) -> None:
    """In the format asked for. Names are those of the first column."""
    if output == "name":
        for one in dict.fromkeys(row[shown[0]] for row in rows):
            click.echo(one)
    else:
        emit(kind, {name: [dict(row) for row in rows]}, output, "\n".join(table_lines(rows, shown)))


def named(names: Collection[str], what: str, rows: Sequence[Row], column: str = "id") -> list[Row]:
    """The rows of these names; all without a name. Raises CommandError for a name that none has."""
    if unknown := sorted(set(names) - {row[column] for row in rows}):
        raise CommandError(f"no {what} {', '.join(unknown)}", ExitCode.NOT_FOUND, reason=f"UNKNOWN_{what.upper()}")
    return [row for row in rows if not names or row[column] in names]


def table_lines(rows: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> list[str]:
    return columns(
        [_heading(column) for column in shown], [[cell(row[column]) for column in shown] for row in rows]
    ).splitlines()


def _heading(column: str) -> str:
    for span, unit in _RATES.items():
        column = column.replace(span, unit)
    return column.upper().replace("_", "-")


def cell(value: object) -> object:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in ("", None) else f"{round(value, 3):.15g}" if isinstance(value, float) else value
