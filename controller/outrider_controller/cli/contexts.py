"""Named stacks on this machine: `outrider up` runs under a name, by which commands in other terminals find it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from outrider.user_cache import cache_directory

from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.private import locked, make_private, write_whole

DEFAULT = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, slots=True)
class Context:
    """A stack that is up."""

    name: str
    pid: int
    started_s: float
    """Unix time."""
    endpoints: Mapping[str, str]
    """`model`, `grpc`, `http` and `control`."""
    operator_token_file: str = ""


def check_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """For an option that names a context; empty names none."""
    if value and not _NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not 1 to 63 of a-z, 0-9 and '-'")
    return value


@contextlib.contextmanager
def claimed(wanted: str) -> Iterator[str]:
    """A name for a stack of this process, until the block ends: `wanted`, or a free one if it is empty.

    Raises CommandError when a stack with that name runs.
    """
    name = _claim(wanted)
    try:
        yield name
    finally:
        _file(name).unlink(missing_ok=True)


def publish(name: str, endpoints: Mapping[str, str], operator_token_file: Path | None = None) -> None:
    """From here on commands find the stack of this process, and may operate it."""
    _write(name, {"endpoints": dict(endpoints), "operator_token_file": str(operator_token_file or "")})


def operator_token(control: str = "") -> str:
    """What a command says to this control plane: OUTRIDER_OPERATOR_TOKEN, or the token of the stack here that has it at
    this address. Empty where there is none."""
    if token := os.environ.get("OUTRIDER_OPERATOR_TOKEN"):
        return token
    files = [one.operator_token_file for one in running() if one.endpoints.get("control") == control]
    with contextlib.suppress(OSError):
        return Path(files[0]).read_text().strip() if files and files[0] else ""
    return ""


def running() -> list[Context]:
    """Stacks that are up, the first started first."""
    entries = {file.stem: entry for file in _directory().glob("*.json") if (entry := _read(file)) is not None}
    found = [
        Context(name, entry["pid"], entry["started_s"], entry["endpoints"], entry.get("operator_token_file", ""))
        for name, entry in entries.items()
        if entry.get("endpoints")
    ]
    return sorted(found, key=lambda context: (context.started_s, context.name))


def choose(name: str, contexts: Sequence[Context]) -> Context | None:
    """The one of that name; without a name the default, else the one that runs longest. None when none runs.

    Raises CommandError for a name that none has.
    """
    for context in contexts:
        if context.name == (name or DEFAULT):
            return context
    if name:
        others = ", ".join(context.name for context in contexts) or "none"
        raise CommandError(f"no stack named {name} runs here (running: {others})", ExitCode.NOT_FOUND)
    return contexts[0] if contexts else None


def _claim(wanted: str) -> str:
    numbered = (f"{DEFAULT}-{number}" for number in itertools.count(2))
    with locked(make_private(_directory())):
        for name in [wanted] if wanted else itertools.chain([DEFAULT], numbered):
            if _read(_file(name)) is None:
                _write(name, {})
                return name
    raise CommandError(f"a stack named {wanted} runs here already", ExitCode.USAGE)


def _directory() -> Path:
    return cache_directory() / "contexts"


def _file(name: str) -> Path:
    return _directory() / f"{name}.json"


def _write(name: str, more: Mapping[str, Any]) -> None:
    me = psutil.Process()
    entry = {"pid": me.pid, "process_started_s": me.create_time(), "started_s": time.time(), **more}
    write_whole(_file(name), json.dumps(entry))


def _read(file: Path) -> dict[str, Any] | None:
    """None when its process no longer lives, or the file is none of ours."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
        entry: dict[str, Any] = json.loads(file.read_text())
        if abs(psutil.Process(entry["pid"]).create_time() - entry["process_started_s"]) < 1:
            return entry
    return None
