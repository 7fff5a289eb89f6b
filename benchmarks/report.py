"""The output of a measurement: a table, a JSON document and an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from outrider.hardware import hardware
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.output import columns, write_json

Row = Mapping[str, object]
"""Column → cell, in order of the columns; None: no value."""


def table(rows: Sequence[Row]) -> str:
    """The columns of all rows. One without any value is left out; elsewhere a missing value is a dash."""
    names = [
        name for name in dict.fromkeys(name for row in rows for name in row) if any(_has(row, name) for row in rows)
    ]
    return columns(names, [[row[name] if _has(row, name) else "-" for name in names] for row in rows])


def _has(row: Row, name: str) -> bool:
    return row.get(name) is not None


def show(*paragraphs: str) -> None:
    """On stdout, with an empty line between; empty ones are left out."""
    click.echo("\n\n".join(filter(None, paragraphs)))


def finish(name: str, body: Mapping[str, Any], json_file: Path | None) -> int:
    """Writes the figures to the file of `--json`, if given. Returns the exit code: ERROR if `holds` is false."""
    write_json(json_file, f"bench-{name}", {**body, "hardware": hardware()})
    return ExitCode.OK if body.get("holds", True) else ExitCode.ERROR
