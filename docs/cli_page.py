"""Writes docs/cli.md from the commands and the processes' configuration classes: python docs/cli_page.py"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
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

Every command of `outrider`, the processes that it starts, and the [load test](loadtest.md). `python docs/cli_page.py`
writes this page. Do not edit it. An option that another command has with the same meaning is named, and explained
there. A process reads each of its options also from a file and from the environment: [configuration](configuration.md).
"""
_OF_MANY = 4
_OF_ONE = 4


@dataclass(frozen=True)
class Section:
    path: str
    lead: str
    rows: list[tuple[str, str]]
    """(flags, meaning)"""


def page() -> str:
    """The whole page."""
    context = click.Context(cli, info_name="outrider")
    sections: list[Section] = []
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        if f"outrider {name}" not in PROCESSES:
            sections += _sections(f"outrider {name}", command, context)
    sections += [Section(path, f"{what}\n", list(_options(cls))) for path, (what, cls) in PROCESSES.items()]
    sections += _sections("python -m loadtest", loadtest, click.Context(loadtest))
    count = Counter(row for section in sections for row in section.rows)
    common = [row for row in count if count[row] >= _OF_MANY]
    parts = [_HEAD, _exit_codes(), "Options of many commands:\n", _listed(common)]
    for number, section in enumerate(sections):
        parts += _written(section, set(common), sections[:number])
    return "\n".join(parts)


def _written(section: Section, common: set[tuple[str, str]], earlier: list[Section]) -> Iterator[str]:
    yield f"## {section.path}\n"
    yield section.lead
    rows = [row for row in section.rows if row not in common]
    like = max(earlier, key=lambda other: len(set(other.rows) & set(rows)), default=section)
    same = set(like.rows) & set(rows) if like is not section else set()
    if len(same) < _OF_ONE:
        same = set()
    if own := [row for row in rows if row not in same]:
        yield _listed(own)
    if same:
        yield f"As `{like.path}`: {_named(row for row in rows if row in same)}.\n"
    if shared := [row for row in section.rows if row in common]:
        yield f"Of many commands: {_named(shared)}.\n"


def _named(rows: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"`{re.search(r'--[a-z-]+', flags)[0]}`" for flags, _ in rows)  # type: ignore[index]


def _listed(rows: list[tuple[str, str]]) -> str:
    return "\n".join([*(f"- `{flags}` {meaning}".rstrip() for flags, meaning in rows), ""])


def _exit_codes() -> str:
    rows = re.findall(r"^  (\d+) +(.+)$", HELP, re.MULTILINE)
    return "\n".join(["| exit code | meaning |", "|---|---|", *(f"| {code} | {what} |" for code, what in rows), ""])


def _sections(path: str, command: click.Command, parent: click.Context) -> Iterator[Section]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    lead = f"`{path} {usage}`\n\n" if usage else ""
    rows = [row for parameter in command.params if (row := _option(parameter, context)) is not None]
    yield Section(path, lead + _paragraphs(inspect.cleandoc(command.help or "")), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _sections(f"{path} {name}", found, context)


def _paragraphs(text: str) -> str:
    """Click's mark of lines that stay as they are becomes a block of text."""
    parts = []
    for part in text.split("\n\n"):
        kept = part.startswith("\b\n")
        parts.append(f"```text\n{part[2:]}\n```" if kept else part)
    return "\n\n".join(parts) + "\n"


def _option(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    record = parameter.get_help_record(context)
    if record is None or not isinstance(parameter, click.Option):
        return None
    flags, meaning = (" ".join(part.split()) for part in record)
    # What the type says already.
    flags = re.sub(r" (INTEGER|FLOAT)( RANGE)?$", " N", flags)
    return flags, meaning


def _options(cls: type[Any]) -> Iterator[tuple[str, str]]:
    listed = set()
    for setting in settings(cls):
        if setting.name not in listed:
            listed.add(setting.name)
            yield setting.flag, f"{setting.doc()} {_default(setting)}".strip()


def _default(setting: ConfigOption) -> str:
    if setting.default is MISSING:
        return "Required."
    text = default_text(setting)
    return f"[default: {text}]" if text else ""


if __name__ == "__main__":
    PAGE.write_text(page())
