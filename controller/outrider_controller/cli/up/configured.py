"""Options of a command from a file: --config. The environment, and the order of the three, are click's own."""

from __future__ import annotations

from pathlib import Path

import click
from outrider.configuration import ConfigError, read_mapping


def options_from_file(context: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    """Makes what the file says the defaults of the command. Raises UsageError that names the file and the option."""
    if file is None:
        return
    options = context.command.params
    names = {name.lstrip("-").replace("-", "_"): option.name for option in options for name in option.opts}
    try:
        given = read_mapping(file)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    for name in given:
        if name not in names or names[name] == parameter.name:
            raise click.UsageError(f"{name}: is no option ({file})")
    context.default_map = {str(names[name]): value for name, value in given.items()}
