"""Spans of time as people write them: 30s, 10m, 12h, 90d."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
MAX_S = 86_400
"""Of what an option may say."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(text: str) -> int | None:
    """None for what is no span."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    return int(match[1]) * _UNITS[match[2]] if match else None


def span_option(flag: str, name: str, default: str, help: str) -> Callable[[F], F]:
    """An option that gives seconds."""

    def convert(ctx: click.Context, param: click.Parameter, value: str) -> int:
        found = seconds(value)
        if found is None or found > MAX_S:
            raise click.BadParameter(f"{value!r} is no span such as 30s, 10m or 12h, a day at most")
        return found

    return click.option(flag, name, default=default, show_default=True, metavar="SPAN", callback=convert, help=help)
