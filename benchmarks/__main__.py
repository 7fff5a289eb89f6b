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
    "acceptance": (
        f"{_SCENARIOS}.acceptance",
        "acceptance",
        "How much of what each kind of draft guesses is right?",
    ),
    "latency": (
        f"{_SCENARIOS}.latency",
        "latency",
        "How much faster is one stream, also far away and with a bad draft?",
    ),
    "prediction": (
        f"{_SCENARIOS}.prediction",
        "prediction",
        "How much faster is an answer that the client knows but for some words?",
    ),
    "predicted": (f"{_SCENARIOS}.predicted", "predicted", "How near is `outrider compare drafts` to what is measured?"),
    "what-if": (f"{_SCENARIOS}.what_if", "what_if", "How near is `outrider plan --what-if` to what a stack does?"),
    "fleet": (f"{_SCENARIOS}.fleet", "fleet", "What would a day of 1,000 targets and 10,000 tenants cost and save?"),
    "vocabularies": (
        f"{_SCENARIOS}.vocabularies",
        "vocabularies",
        "How much is right of what a model with another tokenizer drafts?",
    ),
    "gpu-pairs": (
        f"{_SCENARIOS}.gpu_pairs",
        "gpu_pairs",
        "What would waiting, trees and lookups be worth on GPUs? Computed.",
    ),
    "rollouts": (f"{_SCENARIOS}.rollouts", "rollouts", "How soon is a worse draft undone, and a better one promoted?"),
    "releases": (
        f"{_SCENARIOS}.releases",
        "releases",
        "How soon is a tenant's text learnt, and what is forgotten?",
    ),
    "repeats": (f"{_SCENARIOS}.repeats", "repeats", "How much faster are answers that are given again, with suffixes?"),
    "distilling": (f"{_SCENARIOS}.distilling", "distilling", "How many tokens does distill write and learn a second?"),
    "structured": (
        f"{_SCENARIOS}.structured",
        "structured",
        "Are answers valid under the schemas of a public suite, with speculation as without?",
    ),
    "lookups": (f"{_SCENARIOS}.lookups", "lookups", "What do drafts that a target looks up cost between two steps?"),
    "load": (f"{_SCENARIOS}.load", "load", "Does speculation pay with many streams, and does auto find out?"),
    "autoscaler": (
        f"{_SCENARIOS}.autoscaler",
        "autoscaler",
        "Is it right about who speculates, and quick to notice that it is wrong? In virtual time.",
    ),
    "scale": (f"{_SCENARIOS}.scale", "scale", "Thousands of prompts, on and off, in one process: equal texts?"),
    "context": (f"{_SCENARIOS}.context", "context", "What does a token cost as the context grows?"),
    "router": (f"{_SCENARIOS}.router", "router", "What does the router cost, and what does it add?"),
    "placement": (
        f"{_SCENARIOS}.placement",
        "placement",
        "Are two targets twice as fast with one system prompt?",
    ),
    "startup": (f"{_SCENARIOS}.startup", "startup", "How long does each process take to start and to stop?"),
    "overload": (f"{_SCENARIOS}.overload", "overload", "What do clients see when more comes than fits?"),
    "neighbour": (
        f"{_SCENARIOS}.neighbour",
        "neighbour",
        "What does a tenant notice of another that asks for many times its quota?",
    ),
    "grammars": (
        f"{_SCENARIOS}.grammars",
        "grammars",
        "What does a tenant notice of another that sends hostile grammars?",
    ),
    "dead-engine": (
        f"{_SCENARIOS}.dead_engine",
        "dead_engine",
        "How soon do requests go on elsewhere when a target's engine fails at every step?",
    ),
    "kernels": (f"{_SCENARIOS}.kernels", "kernels", "What do a step and a prompt cost in each variant of the kernels?"),
    "combined": (
        f"{_SCENARIOS}.combined",
        "combined",
        "How much faster than stock transformers is all of it together?",
    ),
    "host": (f"{_SCENARIOS}.host", "host", "What does a step cost a target's own thread, beside the GPU?"),
    "fetch": (f"{_SCENARIOS}.fetch", "fetch", "A larger model to measure with, from Python packages."),
    "quantization": (f"{_SCENARIOS}.quantization", "quantization", "What do fewer bits cost and save?"),
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
