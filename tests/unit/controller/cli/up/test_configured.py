"""outrider up from a file, the environment and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outrider_controller.cli.app import run


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("targets: 2\ndrafts: 2\nrouters: 2\nmetadata: redis://u:secret@h:1\npin: true\n")
    monkeypatch.setenv("OUTRIDER_UP_DRAFTS", "3")
    monkeypatch.setenv("OUTRIDER_UP_ROUTERS", "3")
    assert run(["up", "--config", str(file), "--routers", "4", "--check-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["targets"], shown["drafts"], shown["routers"], shown["pin"]) == (2, 3, 4, True)
    assert shown["metadata_url"] == "redis://***@h:1"


def test_a_password_may_stand_in_the_environment_and_in_no_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["up", "--metadata", "redis://u:hunter2@h:1", "--check-config"]) == 2
    said = capsys.readouterr().err
    assert "others can read a password in --metadata" in said and "hunter2" not in said
    monkeypatch.setenv("OUTRIDER_UP_METADATA", "redis://u:hunter2@h:1")
    assert run(["up", "--check-config"]) == 0


@pytest.mark.parametrize(
    ("content", "named"),
    [("target: 2\n", "target: is not an option"), ("targets: many\n", "--targets"), ("- x\n", "has to be a mapping")],
)
def test_a_bad_line_of_the_file_is_a_usage_error(
    content: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "up.yaml"
    file.write_text(content)
    assert run(["up", "--config", str(file), "--check-config"]) == 2
    assert named in capsys.readouterr().err
