"""Where a running stack is: an option, else the environment, else a stack that runs here, else the defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from outrider_controller.cli import contexts
from outrider_controller.cli.models import DEFAULT_TARGET
from outrider_controller.cli.output import note

_DEFAULTS = {"grpc": "127.0.0.1:8001", "control": "127.0.0.1:8002", "model": DEFAULT_TARGET}
_CONTEXT, _CHOSEN = f"{__name__}.context", f"{__name__}.chosen"

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
        help=f"{explanation}; default: that of the stack running here.",
    )


def context_option(command: F) -> F:
    """--context, for commands with endpoint options."""

    def keep(ctx: click.Context, param: click.Parameter, value: str) -> None:
        ctx.meta[_CONTEXT] = contexts.check_name(ctx, param, value)

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
        help="Stack to ask, by the name that `outrider up` gave it; see `outrider get contexts`.",
    )(command)


def _find(what: str) -> str:
    """`grpc`, `control` or `model` of the stack that is meant."""
    context = _chosen(click.get_current_context())
    return context.endpoints[what] if context is not None else _DEFAULTS[what]


def _chosen(ctx: click.Context) -> contexts.Context | None:
    """Looked up once for a command. Says which it is where another could have been meant."""
    if _CHOSEN not in ctx.meta:
        running, name = contexts.running(), ctx.meta.get(_CONTEXT, "")
        chosen = ctx.meta[_CHOSEN] = contexts.choose(name, running)
        if chosen is not None and len(running) > 1:
            others = ", ".join(context.name for context in running if context != chosen)
            note(f"asking {chosen.name} at {chosen.endpoints['grpc']} (--context; also running here: {others})")
    found: contexts.Context | None = ctx.meta[_CHOSEN]
    return found
