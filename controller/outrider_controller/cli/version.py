"""outrider version"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from outrider_controller.cli.output import emit, output_option

_OF_INTEREST = ("outrider", "torch", "transformers", "ray", "grpcio", "protobuf", "redis")


@click.command("version")
@output_option("text", "json")
def version_command(output: str) -> None:
    """Print the version; with -o json those of the main dependencies too."""
    found = {name: _version(name) for name in _OF_INTEREST}
    emit("version", {"python": platform.python_version(), "packages": found}, output, found["outrider"] or "unknown")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
