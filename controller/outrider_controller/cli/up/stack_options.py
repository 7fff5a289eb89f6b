"""The options of every command that starts a stack."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from outrider.masking import holds_password

from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import note
from outrider_controller.cli.up.models import DEFAULT_TARGET, shipped_draft
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
            if given["drafts"] is None:
                given["drafts"] = _default_drafts(given["target_model"], given["draft_model"])
            try:
                config = StackConfig(**{f.name: given.pop(f.name) for f in fields(StackConfig) if f.name in given})
            except ValueError as error:
                raise click.UsageError(str(error)) from None
            return command(config=config, **given)

        for option in reversed(_options(pin, borrow_cores, trace_tokens)):
            run = option(run)
        return run

    return decorate


def _options(pin: bool, borrow_cores: bool, trace_tokens: bool) -> list[Callable[[F], F]]:
    option, number = click.option, click.IntRange
    path = click.Path(file_okay=False, path_type=Path)
    shown: dict[str, Any] = {"show_default": True}
    return [
        option("--target-model", default=DEFAULT_TARGET, metavar="PATH|NAME", help="Model that answers.", **shown),
        option("--draft-model", default="", metavar="PATH|NAME", help="Model that drafts; default: the one shipped."),
        option("--targets", type=number(1, 64), default=1, help="Target workers.", **shown),
        option("--engine", type=click.Choice(ENGINES), default="outrider", help="Engine of the targets.", **shown),
        option("--vllm-python", default="", metavar="PATH", help="Interpreter that has vLLM; default: this one."),
        option("--tensor-parallel", type=number(1, 64), default=1, help="vLLM's processes of one target.", **shown),
        option(
            "--drafts",
            type=number(0, 64),
            default=None,
            help="Draft workers; default: 1, or 0 where none is shipped for the target and none is given.",
        ),
        option("--target-args", default="", metavar="ARGS", help="Further options of `outrider target`, in quotes."),
        option("--draft-args", default="", metavar="ARGS", help="Further options of `outrider draft`, in quotes."),
        option("--routers", type=number(1, 16), default=1, help="Router actors.", **shown),
        *_placement(pin, borrow_cores),
        option(
            "--run-ahead-tokens",
            type=number(0),
            default=StackConfig().run_ahead_tokens,
            metavar="N",
            help="Most tokens that a draft computes ahead while its proposal is verified.",
            **shown,
        ),
        option(
            "--trace-tokens/--no-trace-tokens",
            default=trace_tokens,
            help="Keep the tokens of answers for `outrider trace`.",
            **shown,
        ),
        option(
            "--metadata",
            "metadata_url",
            default="",
            metavar="URL",
            callback=_without_password,
            help="URL of a Redis; default: start one.",
        ),
        option("--run-dir", type=path, default=None, help="For logs; default: a new one in ~/.cache/outrider/run."),
        option(
            "--start-timeout",
            "start_timeout_s",
            type=click.FloatRange(1),
            default=300.0,
            metavar="S",
            help="Longest wait for a process to be ready.",
            **shown,
        ),
    ]


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


def _placement(pin: bool, borrow_cores: bool) -> list[Callable[[F], F]]:
    """Which core a process runs on, and who goes first there."""
    option = click.option
    shown: dict[str, Any] = {"show_default": True}
    return [
        option(
            "--pin/--no-pin",
            default=pin,
            help="Give each worker one CPU core; other processes share the drafts' cores if no core is left.",
            **shown,
        ),
        option(
            "--borrow-cores/--no-borrow-cores",
            default=borrow_cores,
            help="Let targets read prompts on the drafts' cores too. On separate machines they could not.",
            **shown,
        ),
        option(
            "--realtime/--no-realtime",
            default=pin,
            help="Run drafts and routers with real-time priority, if the system permits.",
            **shown,
        ),
    ]


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
