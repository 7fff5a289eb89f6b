"""outrider bench: measurements, each with a table for people and JSON for programs."""

from __future__ import annotations

import importlib

import click

# Name → one line of help. The line stands here so that help imports no command.
_COMMANDS = {
    "exactness": "Speculation on, off and with another draft: are the texts equal?",
    "distribution": "Does sampling with speculation follow the target's distribution?",
    "acceptance": "How much of what each kind of draft guesses is accepted?",
    "latency": "How much faster is one stream with speculation than without?",
    "rounds": "What does a round take apart, in step, and in one process?",
    "faults": "Kill workers in mid-stream: does the client notice?",
    "tensor-parallel": "One target on several processes: are the texts equal, and how soon is it back?",
    "scale": "Thousands of prompts, speculation on and off, in one process: are the texts equal?",
    "soak": "Thousands of requests that end, are cancelled and lose their KV: is everything given back?",
    "context": "What does a token cost as the context grows?",
    "delay": "What is speculation worth when router and workers are far apart?",
    "drafts": "What does a bad draft cost?",
    "router": "What does the router cost, and what does it add?",
    "quantization": "What do fewer bits cost and save, in the target and in the draft?",
    "simulation": "Does any interleaving of delays, deaths and lies break a promise? In virtual time.",
    "streams": "Many streams at once: do all end, and is everything given back?",
}


class BenchGroup(click.Group):
    """Imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"outrider_controller.cli.bench.{name}")
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure exactness, latency and acceptance.

    Most commands start a stack of their own, ask it through the gateway as a client would, and stop it. With two cores
    or more, target and draft have one each. Exit code 0 only if what is checked holds.
    """
