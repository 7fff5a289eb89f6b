"""python -m benchmarks: help that a stranger can use, and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_controller.cli.app import run

from benchmarks.__main__ import benchmarks
from benchmarks.__main__ import run as bench
from tests.simulation.command import simulation
from tests.soak.__main__ import soak

GROUPS = {"benchmarks": benchmarks, "tests.soak": soak}
COMMANDS = [(name, command) for name, group in GROUPS.items() for command in group.list_commands(None)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("group", "command"), COMMANDS)
def test_every_command_explains_itself(group: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"], GROUPS[group], f"python -m {group}") == 0
    assert f"Usage: python -m {group} {command}" in capsys.readouterr().out


def test_the_simulation_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"], simulation, "python -m tests.simulation") == 0
    assert "Usage: python -m tests.simulation" in capsys.readouterr().out


def test_prompts_that_are_not_there_are_a_usage_error(tmp_path: Path) -> None:
    assert bench(["latency", "--prompts", str(tmp_path / "none.jsonl")]) == 2
