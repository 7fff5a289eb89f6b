"""Commands act on the stack that is meant, and say which where that is in doubt."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from outrider_controller.cli.app import run
from outrider_controller.cli.clusters import contexts
from outrider_controller.cli.exits import CommandError

NOBODY = "127.0.0.1:1"


def up(exits: ExitStack, wanted: str = "", control: str = NOBODY) -> str:
    name = exits.enter_context(contexts.claimed(wanted))
    contexts.publish(name, {"model": "m", "grpc": NOBODY, "http": NOBODY, "control": control})
    return name


@pytest.mark.parametrize("token", ["to\nken", "tökén", "to\x7fken"])
def test_a_token_that_no_header_can_carry_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_OPERATOR_TOKEN", token)
    monkeypatch.setenv("OUTRIDER_API_KEY", token)
    for command in (["get", "workers", "--control", NOBODY], ["generate", "hi", "--gateway", NOBODY]):
        assert run(command) == 7
        assert "a token is one line of printable ASCII" in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_OPERATOR_TOKEN", "from a file of Windows\r")
    assert contexts.operator_token() == "from a file of Windows"


def test_stacks_side_by_side_have_names_of_their_own_and_leave_nothing(cache: Path) -> None:
    with ExitStack() as exits:
        assert [up(exits), up(exits), up(exits, "blue")] == ["default", "default-2", "blue"]
        with pytest.raises(CommandError, match="blue runs here already"):
            up(exits, "blue")
        assert sorted(one.name for one in contexts.running()) == ["blue", "default", "default-2"]
    assert contexts.running() == []
    assert list((cache / "contexts").iterdir()) == []


def test_a_stack_started_later_does_not_take_the_place_of_the_default() -> None:
    with ExitStack() as exits:
        up(exits, "blue")
        assert contexts.choose("", contexts.running()).name == "blue"
        up(exits)
        up(exits, "green")
        assert contexts.choose("", contexts.running()).name == "default"
        assert contexts.choose("green", contexts.running()).name == "green"
        with pytest.raises(CommandError, match="red"):
            contexts.choose("red", contexts.running())


def test_a_stack_that_is_not_up_yet_is_not_asked() -> None:
    with contexts.claimed(""):
        assert contexts.running() == []


def test_a_killed_stack_is_forgotten_and_its_name_free(cache: Path) -> None:
    code = "import os; from outrider_controller.cli.clusters import contexts as c; e = c.claimed('blue'); "
    code += "e.__enter__(); c.publish('blue', {'model': 'm'}); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert (cache / "contexts" / "blue.json").exists()
    assert contexts.running() == []
    with contexts.claimed("blue") as name:
        assert name == "blue"


def test_a_command_says_whom_it_asks_only_when_more_than_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as exits:
        up(exits, control="127.0.0.1:2")
        assert run(["get", "workers"]) == 5
        assert "asking" not in capsys.readouterr().err
        up(exits, "blue", control="127.0.0.1:3")
        assert run(["get", "workers"]) == 5
        said = capsys.readouterr().err
        assert "asking default" in said and "blue" in said and "127.0.0.1:2" in said
        assert run(["get", "workers", "--context", "blue"]) == 5
        assert "127.0.0.1:3" in capsys.readouterr().err
        assert run(["get", "workers", "--control", NOBODY]) == 5
        assert "asking" not in capsys.readouterr().err
        assert run(["get", "workers", "--context", "red"]) == 3
        assert "red" in capsys.readouterr().err


def test_contexts_are_listed_the_default_first(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as exits:
        up(exits, "blue")
        up(exits)
        assert run(["get", "contexts", "-o", "json"]) == 0
        listed = json.loads(capsys.readouterr().out)["contexts"]
        assert [(one["name"], one["default"]) for one in listed] == [("default", True), ("blue", False)]
        assert run(["get", "contexts"]) == 0
        assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["NAME", "DEFAULT", "PID"]


def test_a_name_that_could_be_a_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["get", "workers", "--context", "../x"]) == 2
    assert "--context" in capsys.readouterr().err


def test_the_operators_token_goes_to_the_stack_that_it_is_of_and_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("outrider-operator-1\n")
    with ExitStack() as exits:
        name = exits.enter_context(contexts.claimed(""))
        contexts.publish(name, {"control": "127.0.0.1:8002"}, tmp_path / "token")
        assert contexts.operator_token("127.0.0.1:8002") == "outrider-operator-1"
        assert contexts.operator_token("127.0.0.1:8003") == contexts.operator_token() == ""
        monkeypatch.setenv("OUTRIDER_OPERATOR_TOKEN", "mine")
        assert contexts.operator_token("127.0.0.1:8002") == contexts.operator_token() == "mine"
    monkeypatch.delenv("OUTRIDER_OPERATOR_TOKEN")
    assert contexts.operator_token("127.0.0.1:8002") == ""
