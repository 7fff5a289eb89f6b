"""python -m tests.soak NAME: one of the long checks. Exit code 0 only if it holds."""

from __future__ import annotations

import click
from outrider_controller.cli.app import LazyGroup, main

# Name → (module, attribute, one line of help). The line stands here so that help imports no command.
_COMMANDS = {
    "faults": ("tests.soak.faults", "faults", "Kill workers in mid-stream: does the client notice?"),
    "kill-pairs": ("tests.soak.kill_pairs", "kill_pairs", "Kill each process and each pair: is it served again?"),
    "rolling": ("tests.soak.rolling", "rolling", "Restart every process in turn under load: does a request fail?"),
}


@click.group(cls=LazyGroup, table=_COMMANDS)
def soak() -> None:
    """Long checks on real processes. Each starts what it needs, and stops it."""


if __name__ == "__main__":
    main(command=soak, name="python -m tests.soak")
