"""Writes docs/configuration.md from the processes' configuration classes: python docs/configuration_page.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from outrider.configuration import ConfigOption, default_text, settings
from outrider.draft.config import DraftConfig
from outrider.gateway.config import GatewayConfig
from outrider.target.config import TargetConfig
from outrider_controller.config import ControllerConfig
from outrider_controller.control.config import ControlConfig
from outrider_controller.router.config import RouterConfig

PAGE = Path(__file__).parent / "configuration.md"

PROCESSES: dict[str, tuple[str, type[Any]]] = {
    "Target worker": ("outrider target", TargetConfig),
    "Draft worker": ("outrider draft", DraftConfig),
    "Gateway": ("outrider gateway", GatewayConfig),
    "Router": ("python -m outrider_controller.router", RouterConfig),
    "Control plane": ("python -m outrider_controller.control", ControlConfig),
    "Controller": ("outrider controller", ControllerConfig),
}

HEAD = """\
# Configuration

`python docs/configuration_page.py` writes this page from the configuration classes. Do not edit it.

Every process takes its options from three places. Each place goes before the one above it:

1. a YAML file, which `--config FILE` or `OUTRIDER_CONFIG` names: `drain_timeout: 60`
2. the environment: `OUTRIDER_DRAIN_TIMEOUT=60`
3. the command line: `--drain-timeout 60`

An option has the same name in all three, with underscores or dashes. Times are in seconds. A list is a YAML list, or
joined by commas in the environment, or a repeated flag. A switch is `true` or `false`, on the command line `--NAME` or
`--no-NAME`. Secrets come from files: an option names the file. An unknown option in the file, or an invalid
value, ends the process with exit code 2 and one line that names both.

`--check-config` checks all options, prints those in effect as JSON (secrets masked, as `/configz` does), and ends with
exit code 0 or 2. It loads no model and connects to nothing. What it prints is itself a valid file, but for what is
masked. `--help` prints the tables below.
"""


def page() -> str:
    return "\n".join([HEAD, *(_section(title, *process) for title, process in PROCESSES.items())])


def _section(title: str, command: str, cls: type[Any]) -> str:
    lines = [f"## {title}", "", f"`{command}`", "", "| option | default | |", "|---|---|---|"]
    return "\n".join([*lines, *_rows(cls), ""])


def _rows(cls: type[Any]) -> Iterator[str]:
    listed = set()
    for setting in settings(cls):
        if setting.name not in listed:
            listed.add(setting.name)
            yield f"| `{setting.name}` | {_default(setting)} | {_escaped(setting.doc())} |"


def _default(setting: ConfigOption) -> str:
    if setting.default is MISSING:
        return "required"
    text = default_text(setting)
    return f"`{text}`" if text else ""


def _escaped(text: str) -> str:
    return re.sub(r"([|<])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(page())
