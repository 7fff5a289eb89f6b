"""How a measurement is told: one table for people, one JSON document for programs, one exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.hardware import hardware
from outrider_controller.cli.output import columns, write_json

Row = Mapping[str, object]
"""Column → cell, in the order in which they stand; None: there is no value."""


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
    """Writes the figures where `--json` asked for it. The exit code: whether what is checked holds, if anything is."""
    write_json(json_file, f"bench-{name}", {**body, "hardware": hardware()})
    return ExitCode.OK if body.get("holds", True) else ExitCode.ERROR
