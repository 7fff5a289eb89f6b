"""outrider completion, and outrider version"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click
from click.shell_completion import get_completion_class

from outrider_controller.cli.output import emit, output_option

_VARIABLE = "_OUTRIDER_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes the shell complete commands and options.

    \b
    bash: source <(outrider completion bash)
    zsh:  source <(outrider completion zsh)
    fish: outrider completion fish | source
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "outrider", _VARIABLE).source())


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
