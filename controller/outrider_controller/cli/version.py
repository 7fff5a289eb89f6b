"""outrider version"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from outrider_controller.cli.output import emit_json, output_option

_OF_INTEREST = ("outrider", "torch", "transformers", "ray", "grpcio", "protobuf", "redis")


@click.command("version")
@output_option("text", "json")
def version_command(output: str) -> None:
    """Print the version; with -o json those of the main dependencies too."""
    if output == "json":
        found = {name: _version(name) for name in _OF_INTEREST}
        emit_json("version", {"python": platform.python_version(), "packages": found})
    else:
        click.echo(_version("outrider"))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
