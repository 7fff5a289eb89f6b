"""The drafts of a stack whose operator named none: those that were measured to be fastest on this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from outrider.ways import file_of, kept

from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import OUR_ENGINE, said_by
from outrider_controller.cli.up.stack_config import StackConfig

_OF_DRAFTS = ("head", "remote_head", "lookups", "config")
"""Options of a target that say what drafts; a file of options may."""


def names_drafts(config: StackConfig) -> bool:
    """Whether the operator said what drafts."""
    flags = {word.partition("=")[0] for word in shlex.split(config.target_args)}
    names = {f"--{name.replace('_', '-')}" for name in _OF_DRAFTS}
    named = flags & names or {f"OUTRIDER_{name.upper()}" for name in _OF_DRAFTS} & os.environ.keys()
    return bool(named or config.draft_model or config.draft_args or config.engine != OUR_ENGINE)


async def with_best_way(config: StackConfig, target: Path, report: Callable[[str], None]) -> StackConfig:
    """Measures where this machine has not yet; where that fails, the drafts stay as they are."""
    options = shlex.split(config.target_args)
    file = file_of(target, options)
    if kept(file) is None:
        report("measures once which drafts are fastest on this machine")
        try:
            await said_by("outrider.comparison.best_way", [config.target_model, str(file), *options], _unsaid)
        except CommandError as error:
            report(f"drafts: a draft worker; what is fastest could not be measured: {error}")
    way = kept(file)
    if way is None:
        return config
    report(way.line)
    head = f"{config.target_args} --head {way.head}".strip() if way.head else config.target_args
    return replace(config, drafts=config.drafts if way.draft else 0, target_args=head)


def _unsaid(line: str) -> None:
    """What libraries print on stderr."""
