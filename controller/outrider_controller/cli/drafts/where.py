"""Where a draft should run, of what `outrider compare drafts` measured: the options and the table of both commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outrider_controller.cli.asking import NumberRange, duration
from outrider_controller.cli.output import columns

if TYPE_CHECKING:
    from outrider.comparison.places import DraftPlace, MeasuredDrafts

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--round-trip",
        callback=duration,
        default="1ms",
        show_default=True,
        help="Of the network between target and draft workers.",
    ),
    click.option("--gbit", type=NumberRange(0, min_open=True), default=10.0, show_default=True, help="Its gigabits/s."),
    click.option(
        "--slower",
        type=NumberRange(0, min_open=True),
        default=1.0,
        show_default=True,
        help="Times that a draft takes as long on a draft worker's device.",
    ),
)


def link_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def found_places(measured: MeasuredDrafts, *, round_trip: float, gbit: float, slower: float) -> list[DraftPlace]:
    from outrider.comparison.places import Link, places

    return places(measured, Link(round_trip, gbit * 1e9 / 8, slower))


def read_measured(file: Path) -> MeasuredDrafts:
    """Of `outrider compare drafts -o json`. Raises ValueError."""
    from outrider.comparison.places import MeasuredDrafts

    try:
        found = json.loads(file.read_text())
        return MeasuredDrafts.read(found["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: no output of outrider compare drafts -o json: {error!r}") from None


def where_table(places: list[DraftPlace]) -> str:
    """A row for each place, and what is best."""
    rows: dict[tuple[str, str], list[str]] = {}
    for place in places:
        row = rows.setdefault((place.name or "plain decoding", _where(place)), [])
        row += [f"{place.tokens_per_s:.1f}", f"{place.freed:.0%}"]
    streams = dict.fromkeys(place.streams for place in places)
    header = ["DRAFT", "WHERE", *(name for n in streams for name in (f"TOKENS/S, {n}", "FREED"))]
    best = [
        f"most tokens with {place.streams} stream{'s' * (place.streams > 1)}: "
        f"{place.name or 'plain decoding'} {_where(place)}".rstrip()
        for place in places
        if place.best
    ]
    return "\n".join([columns(header, [[*key, *row] for key, row in rows.items()]), "", *best])


def _where(place: DraftPlace) -> str:
    return ("on a draft worker" if place.on_worker else "in the target") if place.name else ""
