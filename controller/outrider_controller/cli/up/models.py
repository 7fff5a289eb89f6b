"""Where the models of a stack lie. Fetching one is left to a child process: it needs torch, a supervisor does not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from outrider.checkpoint_files import engine_fault, fault
from outrider.model_names import fetched_directory

from outrider_controller.cli.exits import CommandError

DEFAULT_TARGET = "smollm2-135m-instruct"
_SHIPPED_DRAFTS = {DEFAULT_TARGET: "smollm2-135m-draft"}


def default_draft(target: str) -> str:
    """The draft that goes with a target when none is named. Raises CommandError when there is none."""
    draft = shipped_draft(target)
    if not draft:
        ways = "give --draft-model; or --drafts 0, and the target looks drafts up itself"
        raise CommandError(f"no draft is shipped for {target}: {ways}")
    return draft


def shipped_draft(target: str) -> str:
    """The draft that is shipped for a target; empty when there is none."""
    return _SHIPPED_DRAFTS.get(target, "")


def located(model: str) -> Path | None:
    """The model's directory, if nothing has to be fetched or converted first."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    try:
        cached = fetched_directory(model)
    except ValueError as error:
        raise CommandError(str(error)) from None
    return cached if not path.exists() and (cached / "config.json").is_file() else None


def checked(path: Path) -> Path:
    """The directory itself. Raises CommandError for a fault that shows without reading weights."""
    if (found := fault(path) or engine_fault(path)) is not None:
        raise CommandError(str(found))
    return path


async def fetched(model: str, report: Callable[[str], None]) -> Path:
    """The model's directory; downloads and converts on first use. Raises CommandError with the reason."""
    if (path := located(model)) is not None:
        return checked(path)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_controller.cli.up.fetch", model),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None and child.stderr is not None
    try:
        last = ""
        async for line in child.stderr:
            last = line.decode(errors="replace").strip() or last
            report(last)
        found = (await child.stdout.read()).decode().strip()
        if await child.wait() != 0:
            raise CommandError(last or f"{model}: could not be fetched")
        return Path(found)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
