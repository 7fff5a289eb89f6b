"""How commands are asked for, and ask back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from outrider_controller.cli.exits import CommandError

F = TypeVar("F", bound=Callable[..., Any])


class Nouns(click.Group):
    """Takes each noun in the singular and in the plural."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        forms = (cmd_name, f"{cmd_name}s", cmd_name.removesuffix("s"))
        return next((found for form in forms if (found := super(Nouns, self).get_command(ctx, form))), None)


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
