"""Where a running stack is: an option, else the environment, else the stack last started here, else the defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import click

from outrider_controller.cli.models import DEFAULT_TARGET, state_file

_DEFAULTS = {"grpc": "127.0.0.1:8001", "control": "127.0.0.1:8002", "model": DEFAULT_TARGET}


def endpoint_option(flag: str, what: str, env: str, explanation: str) -> Callable[[Callable[..., Any]], Any]:
    """An option whose default is looked up when the command runs."""
    return click.option(
        flag,
        what,
        envvar=env,
        show_envvar=True,
        default=lambda: find(what),
        metavar="NAME" if what == "model" else "HOST:PORT",
        help=f"{explanation}; default: that of the stack running here.",
    )


def find(what: str) -> str:
    """`grpc`, `control` or `model` of the stack that runs on this machine."""
    try:
        state = json.loads(state_file().read_text())
        os.kill(int(state["pid"]), 0)
        return str(state[what])
    except (OSError, ValueError, KeyError, TypeError):
        return _DEFAULTS[what]
