"""Where a cluster is: an option, else the environment, else the context that is meant, else the defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from outrider_controller.cli.clusters import contexts
from outrider_controller.cli.up.models import DEFAULT_TARGET

_DEFAULTS = {"grpc": "127.0.0.1:8001", "control": "127.0.0.1:8002", "model": DEFAULT_TARGET}

F = TypeVar("F", bound=Callable[..., Any])


def endpoint_option(flag: str, what: str, env: str, explanation: str) -> Callable[[F], F]:
    """An option whose default is looked up when the command runs."""
    return click.option(
        flag,
        what,
        envvar=env,
        show_envvar=True,
        default=lambda: _find(what),
        metavar="NAME" if what == "model" else "HOST:PORT",
        help=f"{explanation}; default: that of the context.",
    )


def context_option(command: F) -> F:

    def keep(ctx: click.Context, param: click.Parameter, value: str) -> None:
        contexts.want(ctx, contexts.check_name(ctx, param, value))

    return click.option(
        "--context",
        envvar="OUTRIDER_CONTEXT",
        show_envvar=True,
        default="",
        metavar="NAME",
        callback=keep,
        # The endpoints' defaults depend on it.
        is_eager=True,
        expose_value=False,
        help="Cluster or stack to ask, by its name; see `outrider get contexts`.",
    )(command)


def _find(what: str) -> str:
    """`grpc`, `control` or `model` of the context that is meant."""
    context = contexts.chosen(click.get_current_context())
    found = context.endpoints[what] if context is not None else _DEFAULTS[what]
    if not found:
        assert context is not None
        raise click.UsageError(f"{context.name} has no {what}: give it here, or with outrider config set-context")
    return found
