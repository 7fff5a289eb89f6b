"""Exit codes, and help that a stranger can use."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from outrider_controller.cli.app import run

COMMANDS = ["up", "demo", "generate", "get", "trace", "distill", "version"]


@pytest.mark.parametrize("command", [[c] for c in COMMANDS] + [["get", "workers"]])
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    assert "Usage: outrider " + " ".join(command) in capsys.readouterr().out


def test_what_makes_no_sense_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hi", "--top-k", "-1"]) == 2
    assert "--top-k" in capsys.readouterr().err
    assert run(["demo", "--engine", "int3"]) == 2
    assert run(["no-such-command"]) == 2


def test_a_shell_can_complete_commands_without_loading_them() -> None:
    code = (
        "import sys; from outrider_controller.cli.app import run; run([]); print({'torch', 'grpc'} & set(sys.modules))"
    )
    variables = {"_OUTRIDER_COMPLETE": "bash_complete", "COMP_WORDS": "outrider d", "COMP_CWORD": "1"}
    start = (sys.executable, "-X", "importtime", "-c", code)
    said = subprocess.run(start, capture_output=True, text=True, timeout=60, env={**os.environ, **variables})
    assert "plain,describe\n" in said.stdout and "plain,drain\n" in said.stdout
    assert "grpc" not in said.stderr


def test_each_shell_gets_a_script_that_asks_outrider(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert run(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert f"_OUTRIDER_COMPLETE={shell}_complete" in script
        if shutil.which(shell) is not None:
            subprocess.run([shell, "-n"], input=script, text=True, timeout=60, check=True)


@pytest.mark.parametrize(("given", "stdin"), [((), ""), ((), " \n"), (("",), ""), (("--raw",), "")])
def test_an_empty_prompt_is_refused_before_anybody_is_asked(
    given: tuple[str, ...], stdin: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert run(["generate", *given, "--model", "m", "--gateway", "127.0.0.1:1"]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_nobody_there_is_told_as_such_and_as_json_when_asked_for() -> None:
    command = (sys.executable, "-m", "outrider_controller.cli", "generate", "hi", "--gateway", "127.0.0.1:1")
    plain = subprocess.run([*command, "--model", "m"], capture_output=True, text=True, timeout=60)
    assert plain.returncode == 5
    assert "is it running" in plain.stderr
    machine = subprocess.run([*command, "--model", "m", "-o", "json"], capture_output=True, text=True, timeout=60)
    assert json.loads(machine.stderr)["error"]["exit_code"] == 5


@pytest.mark.parametrize("program", ["outrider_controller.cli", "outrider.target", "outrider.draft"])
def test_help_loads_neither_torch_nor_grpc(program: str) -> None:
    code = f"import runpy, sys\ntry: runpy.run_module({program!r}, run_name='__main__')\n"
    code += "finally: print({'torch', 'grpc'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60)
    assert "sage: outrider" in said.stdout
    assert said.stdout.endswith("set()\n")


def test_the_version_says_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version", "-o", "json"]) == 0
    packages = json.loads(capsys.readouterr().out)["packages"]
    assert {name: packages[name] for name in ("outrider", "grpcio")} == {
        name: version(name) for name in ("outrider", "grpcio")
    }


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("outrider")


@pytest.mark.parametrize("command", [["up"], ["get", "workers"], ["generate", "hi"]])
def test_a_home_that_cannot_be_used_costs_one_line(command: list[str], tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.touch()
    environment = {**os.environ, "HOME": str(home), "OUTRIDER_CACHE": ""}
    start = (sys.executable, "-m", "outrider_controller.cli", *command)
    said = subprocess.run(start, capture_output=True, text=True, timeout=60, env=environment)
    assert said.returncode in (1, 5)
    assert said.stderr.startswith("outrider: ") and len(said.stderr.splitlines()) == 1


def test_a_directory_for_logs_that_others_may_write_into_is_refused(tiny: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    start = (sys.executable, "-m", "outrider_controller.cli", "up", "--target-model", str(tiny))
    more = ("--drafts", "0", "--run-dir", str(tmp_path), "--http-port", "0", "--grpc-port", "0")
    said = subprocess.run([*start, *more], capture_output=True, text=True, timeout=60)
    assert said.returncode == 1
    assert said.stderr.startswith("outrider: ") and "0700" in said.stderr
