"""Where the models of a stack lie. Fetching one is left to a child process: it needs torch, a supervisor does not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.checkpoint_files import engine_fault, fault
from outrider.model_names import fetched_directory
from outrider.ways import SHIPPED

from outrider_controller.cli.exits import CommandError

OUR_ENGINE, HEAD = "outrider", "head"
DEFAULT_TARGET = "smollm2-135m-instruct"
# The engine runs them, whatever else their configs say: nobody has to wait for a process that loads transformers.
_SURELY_RUN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
SURE_DRAFTS = {name for shipped in SHIPPED.values() for name in (shipped.draft, shipped.head)}
"""Drafts and heads that need no look."""


def default_draft(target: str) -> str:
    """The draft that goes with a target when none is named. Raises CommandError when there is none."""
    draft = shipped_draft(target)
    if not draft:
        ways = "give --draft-model; or --drafts 0, and the target looks drafts up itself"
        raise CommandError(f"no draft is shipped for {target}: {ways}")
    return draft


def shipped_draft(target: str) -> str:
    """The draft that is shipped for a target; empty when there is none."""
    return SHIPPED[target].draft if target in SHIPPED else ""


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


def checked(path: Path, engine: str = OUR_ENGINE) -> Path:
    """The directory itself. Raises CommandError for a fault that shows without reading weights."""
    if (found := fault(path) or (engine_fault(path) if engine == OUR_ENGINE else None)) is not None:
        raise CommandError(str(found))
    return path


async def fetched(model: str, report: Callable[[str], None], engine: str = OUR_ENGINE) -> Path:
    """The model's directory; downloads and converts on first use. Raises CommandError with the reason, also for a model
    that the engine does not run."""
    path = located(model)
    if path is not None and _surely_runs(checked(path, engine), engine):
        return path
    return await asked(str(path or model), engine, report)


async def asked(model: str, what: str, report: Callable[[str], None]) -> Path:
    """As the child process says: `what` as in fetch.py."""
    return Path(await said_by("outrider_controller.cli.up.fetch", [model, what], report))


async def said_by(module: str, arguments: Sequence[str], report: Callable[[str], None]) -> str:
    """What a child process prints. Raises CommandError with its last word on stderr when it fails."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None and child.stderr is not None
    try:
        lines = list[str]()
        async for line in child.stderr:
            # Each is reported when the next comes: the last one may be the reason of a failure.
            if lines:
                report(lines[-1])
            lines += filter(None, [line.decode(errors="replace").strip()])
        found = (await child.stdout.read()).decode().strip()
        if await child.wait() != 0:
            raise CommandError(lines[-1] if lines else f"{module} {' '.join(arguments)} failed")
        if lines:
            report(lines[-1])
        return found
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def _surely_runs(path: Path, engine: str) -> bool:
    """Whether nothing is left to ask of a model that is here and has no fault."""
    config = json.loads((path / "config.json").read_text())
    known = set(config.get("architectures") or [""]) <= _SURELY_RUN
    return engine != OUR_ENGINE or known or "outrider_draft" in config
