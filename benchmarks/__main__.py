"""python -m benchmarks NAME: measurements, each with a table and JSON output. Not in the wheel."""

from __future__ import annotations

from collections.abc import Sequence

import click
from outrider_controller.cli import app

_NAME = "python -m benchmarks"
_SCENARIOS = "benchmarks.scenarios"
# Name → (module, attribute, one line of help). The line is here so that help imports no command.
_COMMANDS = {
    "exactness": (f"{_SCENARIOS}.exactness", "exactness", "Speculation on, off and with another draft: equal texts?"),
    "distribution": (
        f"{_SCENARIOS}.distribution",
        "distribution",
        "Does sampling with speculation follow the target's distribution?",
    ),
    "latency": (
        f"{_SCENARIOS}.latency",
        "latency",
        "How much faster is one stream, also far away and with a bad draft?",
    ),
    "gpu-pairs": (
        f"{_SCENARIOS}.gpu_pairs",
        "gpu_pairs",
        "What would waiting, trees and lookups be worth on GPUs? Computed.",
    ),
    "load": (f"{_SCENARIOS}.load", "load", "Does speculation pay with many streams, and does auto find out?"),
    "scale": (f"{_SCENARIOS}.scale", "scale", "Thousands of prompts, on and off, in one process: equal texts?"),
    "router": (f"{_SCENARIOS}.router", "router", "What does the router cost, and what does it add?"),
    "overload": (f"{_SCENARIOS}.overload", "overload", "What do clients see when more comes than fits?"),
    "kernels": (f"{_SCENARIOS}.kernels", "kernels", "What do a step and a prompt cost in each variant of the kernels?"),
    "adapters": (f"{_SCENARIOS}.adapters", "adapters", "What do 100 adapters cost a draft worker, and 16 in a batch?"),
    "remote-heads": (
        f"{_SCENARIOS}.remote_heads",
        "remote_heads",
        "What does a head on a draft worker cost, and is as much accepted?",
    ),
    "launches": (f"{_SCENARIOS}.launches", "launches", "How many kernels does a step launch on a GPU? Counted."),
    "host": (f"{_SCENARIOS}.host", "host", "What does a step cost a target's own thread, beside the GPU?"),
}


@click.group(cls=app.LazyGroup, table=_COMMANDS)
def benchmarks() -> None:
    """Measure exactness, latency and acceptance.

    Most commands start a stack of their own, ask it through the gateway as a client would, and stop it. With two cores
    or more, target and draft have one each. Exit code 0 only if what is checked holds.
    """


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""
    return app.run(arguments, benchmarks, _NAME)


if __name__ == "__main__":
    app.main(command=benchmarks, name=_NAME)
