"""How commands are asked for, with spans of time as people write them (30s, 10m, 12h, 90d), and ask back."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from outrider_controller.cli.exits import CommandError

F = TypeVar("F", bound=Callable[..., Any])
DAY_S = 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
_SHORT_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Nouns(click.Group):
    """Takes each noun in the singular and in the plural."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        forms = (cmd_name, f"{cmd_name}s", cmd_name.removesuffix("s"))
        return next((found for form in forms if (found := super(Nouns, self).get_command(ctx, form))), None)


class NumberRange(click.FloatRange):
    """click's own takes nan, which is in no range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not a number", param, ctx)
        return found


def duration(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """A click callback, of times below a minute."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", value)
    if found is None:
        raise click.BadParameter("a number and us, ms or s, as 5ms")
    return float(found[1]) * _SHORT_UNITS[found[2]]


def yes_option(command: F) -> F:
    return click.option("-y", "--yes", is_flag=True, help="Do not ask.")(command)


def confirm(question: str, yes: bool) -> None:
    """Raises UsageError where nobody can be asked, CommandError for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is no terminal to confirm it: give --yes")
    if not click.confirm(question, err=True):
        raise CommandError("nothing was changed")


def seconds(text: str) -> int | None:
    """None for what is no span."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    return int(match[1]) * _UNITS[match[2]] if match else None


def span_option(
    flag: str, name: str, default: str | None, help: str, *, least_s: int = 0, most_s: float = float("inf")
) -> Callable[[F], F]:
    """An option that gives seconds, in these bounds; 0 where it is left out and has no default."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> int:
        found = 0 if value is None else seconds(value)
        if found is None or found > most_s or (value is not None and found < least_s):
            least = f", {least_s}s at least" if least_s else ""
            most = f", {most_s // DAY_S:g}d at most" if most_s < float("inf") else ""
            raise click.BadParameter(f"{value!r} is not a duration such as 30s, 10m, 12h or 90d{least}{most}")
        return found

    return click.option(flag, name, default=default, show_default=True, metavar="SPAN", callback=convert, help=help)
