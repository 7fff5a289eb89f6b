"""outrider config: the clusters that commands may ask, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from outrider.address import check_address

from outrider_controller.cli.clusters import contexts
from outrider_controller.cli.clusters import named as clusters
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import note, output_option, print_rows

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_CONTEXT = ("name", "default", "pid", "model", "grpc", "http", "control")
_name = click.argument("name", callback=contexts.check_name)


@click.command("get-contexts")
@output_option("table", "wide", "json", "yaml", "name")
def list_contexts(output: str) -> None:
    """List what commands can ask, by name: clusters (`outrider config`) and stacks that `outrider up` runs here.

    First the one that is asked when none is named.
    """
    found, current = contexts.known()
    first = None
    try:
        first = contexts.choose("", found, current)
    except CommandError as error:
        note(str(error))
    ordered = sorted(found, key=lambda context: context != first)
    rows = [
        {"name": one.name, "default": one == first, "pid": one.pid or None, **one.endpoints, **one.files}
        for one in ordered
    ]
    shown = (*_CONTEXT, *clusters.FILES) if output == "wide" else _CONTEXT
    print_rows("contexts", "contexts", rows, shown, output)


@click.group("config")
def config() -> None:
    """Name clusters, and choose the one that commands ask.

    The names are kept in ~/.config/outrider/config.yaml (XDG_CONFIG_HOME), or OUTRIDER_CONTEXTS_FILE.
    """


config.add_command(list_contexts)


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    try:
        if value is not None:
            check_address("address", value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _authority(ctx: click.Context, param: click.Parameter, value: str | None) -> str | Path | None:
    path: Path | None = _FILE.convert(value, param, ctx) if value not in (None, "system") else None
    return path or value


@config.command("set-context")
@_name
@click.option("--control", callback=_address, metavar="HOST:PORT", help="Its control plane.")
@click.option("--gateway", callback=_address, metavar="HOST:PORT", help="gRPC address of its gateway.")
@click.option("--model", metavar="NAME", help="Model that `outrider generate` asks.")
@click.option(
    "--tls-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With tls.crt, tls.key and ca.crt of an operator.",
)
@click.option("--gateway-ca", callback=_authority, metavar="FILE", help="For the gateway's certificate; or `system`.")
@click.option("--server-name", metavar="NAME", help="What the gateway's certificate names, if not its host.")
@click.option("--token-file", type=_FILE, help="The operator's token, or an API key for admins.")
@click.option("--api-key-file", type=_FILE, help="The API key for the gateway.")
def set_context(name: str, **given: str | Path | None) -> None:
    """Name a cluster, or change what is known of it. The first one named becomes the current one.

    Secrets are read from their files when a command runs. What is not given stays as it was.
    """
    changes: dict[str, Any] = {
        key: str(v.absolute() if isinstance(v, Path) else v) for key, v in given.items() if v is not None
    }
    with clusters.changed() as known:
        cluster = replace(known.named.get(name, clusters.Context(name)), **changes)
        if not (cluster.control and cluster.gateway):
            raise click.UsageError(f"{name} is new: give --control and --gateway")
        known.current = known.current or ("" if known.named else name)
        known.named[name] = cluster
    click.echo(f"{name} is at {cluster.control}")


@config.command("use-context")
@_name
def use_context(name: str) -> None:
    """Have commands ask this cluster, or stack running here, when no other is named."""
    contexts.choose(name, contexts.known()[0])
    with clusters.changed() as known:
        known.current = name
    click.echo(f"commands ask {name}")


@config.command("current-context")
def current_context() -> None:
    """Print the context that commands ask; exit code 3 if there is none."""
    chosen = contexts.choose("", *contexts.known())
    if chosen is None:
        raise CommandError("no cluster is named, and no stack runs here", ExitCode.NOT_FOUND)
    click.echo(chosen.name)


@config.command("delete-context")
@_name
def delete_context(name: str) -> None:
    """Forget a cluster. Nothing in it changes."""
    with clusters.changed() as known:
        if known.named.pop(name, None) is None:
            raise CommandError(f"no cluster is named {name}", ExitCode.NOT_FOUND)
        known.current = "" if known.current == name else known.current
    click.echo(f"{name} is forgotten")
