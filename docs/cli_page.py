"""Writes docs/cli.md from the commands and the processes' configuration classes: python docs/cli_page.py"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from outrider.configuration import ConfigOption, default_text, settings
from outrider.draft.config import DraftConfig
from outrider.gateway.config import GatewayConfig
from outrider.target.config import TargetConfig
from outrider_controller.cli.app import cli
from outrider_controller.cli.exits import HELP
from outrider_controller.config import ControllerConfig
from outrider_controller.control.config import ControlConfig
from outrider_controller.router.config import RouterConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from loadtest.__main__ import loadtest

PAGE = Path(__file__).parent / "cli.md"
PROCESSES: dict[str, tuple[str, type[Any]]] = {
    "outrider target": ("Target worker: verifies drafts and owns the text.", TargetConfig),
    "outrider draft": ("Draft worker: proposes tokens.", DraftConfig),
    "outrider gateway": ("Gateway: text, and both public APIs.", GatewayConfig),
    "outrider controller": ("Routers and control plane, as Ray actors.", ControllerConfig),
    "python -m outrider_controller.router": ("A router in a process of its own, without Ray.", RouterConfig),
    "python -m outrider_controller.control": ("A control plane in a process of its own, without Ray.", ControlConfig),
}
_HEAD = """# Commands

Every command of `outrider`, the processes that it starts, and the [load test](loadtest.md): of a command its first
sentence and the names of its options, of a process's option its first sentence. `--help` says the rest. Not named each
time: `--context` and `--control` (what is asked), `--output` or `-o` (text or table, JSON and others), `--yes`.
`python docs/cli_page.py` writes this page. Do not edit it.
"""
_EVERYWHERE = {"--context", "--control", "-o", "--yes"}
_PROCESSES = """## Processes

A process reads each option also from a file and from the environment: [configuration](configuration.md). A number or
name in brackets is the default.
"""


def page() -> str:
    """The whole page."""
    rows = [*_commands(cli, "outrider"), *_rows("python -m loadtest", loadtest, click.Context(loadtest))]
    parts = [_HEAD, _exit_codes(), "\n".join(["| command | what it does | options |", "|---|---|---|", *rows, ""])]
    return "\n".join([*parts, _PROCESSES, *_processes()])


def _commands(group: click.Group, path: str, parent: click.Context | None = None) -> Iterator[str]:
    context = click.Context(group, info_name=path.rpartition(" ")[2], parent=parent)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}", context)
        elif f"{path} {name}" not in PROCESSES:
            yield from _rows(f"{path} {name}", command, context)


def _rows(path: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    pieces = (piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    usage = " ".join([path, *pieces]).replace("|", "\\|")
    names = _option_names(command)
    yield f"| `{usage}` | {_first_sentence(inspect.cleandoc(command.help or ''))} | {' '.join(names)} |"


def _option_names(command: click.Command) -> list[str]:
    options = [
        parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden
    ]
    return [f"`{max(option.opts, key=len)}`" for option in options if not _is_shared(option)]


def _is_shared(option: click.Option) -> bool:
    # `up` names its stack by --context, and `verify` is given an answer as --output.
    return bool(_EVERYWHERE & set(option.opts)) and (option.opts != ["--context"] or bool(option.envvar))


def _processes() -> Iterator[str]:
    explained: dict[tuple[str, str], str] = {}
    for path, (what, cls) in PROCESSES.items():
        yield f"### {path}\n\n{what}\n"
        named: dict[str, list[str]] = {}
        for row in _options(cls):
            where = explained.setdefault(row, path)
            if where != path:
                named.setdefault(where, []).append(row[0])
        yield "\n".join([*(f"- `{flag}` {text}" for flag, text in _options(cls) if explained[flag, text] == path), ""])
        for where, flags in named.items():
            yield f"As `{where}`: {' '.join(f'`{flag}`' for flag in flags)}.\n"


def _first_sentence(text: str) -> str:
    """With those after it that say what a value means, as in `auto: …`."""
    first, *others = re.split(r"(?<=\.)\s", text.replace("\n", " "))
    return " ".join([first, *takewhile(re.compile(r"[a-z0-9-]+: ").match, others)])


def _exit_codes() -> str:
    rows = re.findall(r"^  (\d+) +(.+)$", HELP, re.MULTILINE)
    return "\n".join(["| exit code | meaning |", "|---|---|", *(f"| {code} | {what} |" for code, what in rows), ""])


def _options(cls: type[Any]) -> Iterator[tuple[str, str]]:
    listed = set()
    for setting in settings(cls):
        if setting.name not in listed:
            listed.add(setting.name)
            yield setting.flag, f"{_first_sentence(setting.doc())} {_default(setting)}".strip()


def _default(setting: ConfigOption) -> str:
    if setting.default is MISSING:
        return "Required."
    text = default_text(setting)
    return f"[{text}]" if text else ""


if __name__ == "__main__":
    PAGE.write_text(page())
