"""python -m tests.soak NAME: one of the long checks. Exit code 0 only if it holds."""

from __future__ import annotations

import click
from outrider_controller.cli.app import LazyGroup, main

# Name → (module, attribute, one line of help). The line stands here so that help imports no command.
_COMMANDS = {
    "bill": ("tests.soak.bill", "bill", "Do tenants' bills add up to what the workers spent, and after a kill -9?"),
    "decisions": (
        "tests.soak.decisions",
        "decisions_command",
        "An operator's word, and the loss of what decides: how soon does the right thing hold?",
    ),
    "faults": ("tests.soak.faults", "faults", "Kill workers in mid-stream: does the client notice?"),
    "fuzz": ("tests.soak.rpc_fuzz", "fuzz", "Mutated messages to every RPC: is each answered, and forgotten?"),
    "healthy": ("tests.soak.healthy", "healthy", "Ten minutes of load: are the alerts silent, and the console true?"),
    "kill-pairs": ("tests.soak.kill_pairs", "kill_pairs", "Kill each process and each pair: is it served again?"),
    "memory": ("tests.soak.memory", "memory", "Thousands of requests of mixed lengths: does any process grow?"),
    "namespaces": ("tests.soak.namespaces", "namespaces", "Are the documented connections all that it needs?"),
    "prefix-probe": ("tests.soak.prefix_probe", "prefix_probe", "Can a tenant see another's cached prefixes?"),
    "ray-head": ("tests.soak.ray_head", "ray_head", "Kill the head of a Ray cluster under load: does a request fail?"),
    "rolling": ("tests.soak.rolling", "rolling", "Restart every process in turn under load: does a request fail?"),
    "screenshot": ("tests.soak.screenshot", "screenshot", "Take the manual's picture of the console, under load."),
    "soak": ("tests.soak.soak", "soak", "Thousands of requests that end, leave and lose their KV: is all given back?"),
    "streams": ("tests.soak.streams", "streams", "Many streams at once: do all end, and is everything given back?"),
    "tenants": ("tests.soak.tenants", "tenants", "Quotas over three gateways; the time of wrong keys: do they hold?"),
    "tensor-parallel": (
        "tests.soak.tensor_parallel",
        "tensor_parallel",
        "A target on several processes: equal texts?",
    ),
}


@click.group(cls=LazyGroup, table=_COMMANDS)
def soak() -> None:
    """Long checks on real processes. Each starts what it needs, and stops it."""


if __name__ == "__main__":
    main(command=soak, name="python -m tests.soak")
