"""The options of every command that starts a stack."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from outrider.configuration import settings
from outrider.masking import holds_password

from outrider_controller.cli.asking import NumberRange
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import shipped_draft
from outrider_controller.cli.output import note
from outrider_controller.cli.up.best_way import names_drafts
from outrider_controller.cli.up.process import ProcessFailed
from outrider_controller.cli.up.stack_config import ENGINES, StackConfig

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def stack_options(
    *, pin: bool, borrow_cores: bool = False, trace_tokens: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the options and hands the command one `config: StackConfig` made of them, and of its own with such names.

    `pin`, `borrow_cores` and `trace_tokens` are the defaults of the options of these names; `--realtime` goes with
    `--pin`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(**given: Any) -> Any:
            open_choice = given["drafts"] is None
            if open_choice:
                given["drafts"] = _default_drafts(given["target_model"], given["draft_model"])
            try:
                config = StackConfig(**{f.name: given.pop(f.name) for f in fields(StackConfig) if f.name in given})
                config = replace(config, measured=open_choice and bool(config.drafts) and not names_drafts(config))
            except ValueError as error:
                raise click.UsageError(str(error)) from None
            return command(config=config, **given)

        defaults = {"pin": pin, "realtime": pin, "borrow_cores": borrow_cores, "trace_tokens": trace_tokens}
        for option in reversed(list(_options({**defaults, "drafts": None}))):
            run = option(run)
        return run

    return decorate


_NO_OPTIONS = {
    "measured",
    *("http_port", "grpc_port", "control_port", "secret_file", "receipt_key_file", "state_dir", "stop_timeout_s"),
}
"""What the command that starts the stack sets itself."""
_TYPES: dict[str, click.ParamType[Any]] = {
    **dict.fromkeys(("targets", "tensor_parallel"), click.IntRange(1, 64)),
    "drafts": click.IntRange(0, 64),
    "routers": click.IntRange(1, 16),
    "engine": click.Choice(ENGINES),
    "run_dir": click.Path(file_okay=False, path_type=Path),
    "start_timeout_s": NumberRange(1),
}


def _options(defaults: Mapping[str, Any]) -> Iterator[Callable[[F], F]]:
    """One for each field of StackConfig, with the text below it; of these `defaults`, else the field's."""
    for setting in settings(StackConfig):
        [name] = setting.path
        if name not in _NO_OPTIONS:
            default = defaults.get(name, setting.default)
            yield click.option(
                f"{setting.flag}/--no-{setting.flag[2:]}" if setting.kind is bool else setting.flag,
                name,
                type=_TYPES.get(name, setting.kind),
                default=default,
                show_default=default not in (None, ""),
                help=setting.doc(),
                callback=_without_password if name == "metadata_url" else None,
            )


def _default_drafts(target: str, draft: str) -> int:
    if draft or shipped_draft(target):
        return 1
    note(f"no draft is shipped for {target}: it looks its drafts up itself; --draft-model names another draft")
    return 0


def _without_password(context: click.Context, parameter: click.Parameter, url: str) -> str:
    """The URL, unless a command line shows its password."""
    shown = context.get_parameter_source("metadata_url") is ParameterSource.COMMANDLINE
    if shown and holds_password(url):
        raise click.BadParameter("others can read a password in --metadata: give it in the environment or in a file")
    return url


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine. Ctrl-C, SIGTERM and SIGHUP cancel it once: what it opened is closed in order.

    Raises KeyboardInterrupt when that was the end of it, CommandError for a process that failed.
    """
    try:
        return asyncio.run(_cancelled_by_signals(work))
    except ProcessFailed as error:
        raise CommandError(str(error), reason="PROCESS_FAILED") from error
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _cancelled_by_signals(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
        else:
            note("already stopping")

    loop = asyncio.get_running_loop()
    # Never taken off again: nothing that happens while it stops may leave a process behind.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    return await task
