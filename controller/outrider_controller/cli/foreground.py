"""One process of the stack in the foreground: everything after its name is handed to it as it stands."""

from __future__ import annotations

import os
import sys

import click

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _command(name: str, module: str) -> click.Command:
    def run(arguments: tuple[str, ...]) -> None:
        # Replaces this process, so that signals and the exit code are the worker's own.
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])

    argument = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    return click.Command(name, callback=run, params=[argument], context_settings=_PASS_THROUGH)


draft = _command("draft", "outrider.draft")
target = _command("target", "outrider.target")
gateway = _command("gateway", "outrider.gateway")
controller = _command("controller", "outrider_controller")
