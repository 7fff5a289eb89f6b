"""Every exit code: what leads to it, that it is documented, and that a program reads it in the error, too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from outrider.errors import Code, OutriderError
from outrider_controller.cli.app import run
from outrider_controller.cli.exits import HELP, CommandError, ExitCode

CODES = {
    Code.INVALID_ARGUMENT: 2,
    Code.OUT_OF_RANGE: 2,
    Code.UNIMPLEMENTED: 2,
    Code.NOT_FOUND: 3,
    Code.ABORTED: 4,
    Code.UNAVAILABLE: 5,
    Code.RESOURCE_EXHAUSTED: 5,
    Code.DEADLINE_EXCEEDED: 6,
    Code.UNAUTHENTICATED: 7,
    Code.PERMISSION_DENIED: 7,
    Code.CANCELLED: 130,
}


def ending(error: BaseException | None) -> click.Command:
    def end(output: str | None) -> None:
        if error is not None:
            raise error

    return click.Command("any", callback=end, params=[click.Option(["-o", "--output"])])


@pytest.mark.parametrize("status", Code)
def test_each_status_of_a_server_has_its_exit_code(status: Code, capsys: pytest.CaptureFixture[str]) -> None:
    answer = OutriderError("why", reason="SOME_REASON")
    answer.code = status
    expected = CODES.get(status, 1)
    assert run(["-o", "json"], ending(CommandError.of(answer, "control plane at x"))) == expected
    error = json.loads(capsys.readouterr().err)["error"]
    assert error == {"reason": "SOME_REASON", "message": "control plane at x: why", "exit_code": expected}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (OSError(13, "Permission denied", "/f"), 1),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), 2),
        (CommandError("why"), 1),
        (click.UsageError("why"), 2),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
    ],
)
def test_what_ends_a_command_here_has_its_exit_code(error: BaseException | None, code: int) -> None:
    assert run([], ending(error)) == code


def test_a_server_that_does_not_know_the_call_is_named_as_such() -> None:
    answer = OutriderError("Method not found!")
    answer.code, answer.reason = Code.UNIMPLEMENTED, None
    said = str(CommandError.of(answer, "control plane at x"))
    assert (
        said == "what answers for the control plane at x does not know this call: another process, or another release"
    )


@pytest.mark.parametrize("expires", ["1960-01-01", "1970-01-01", "2026-01-01T00:00:00+23:00"])
def test_a_key_is_not_made_for_a_time_that_has_passed(expires: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["create", "key", "t", "--expires", expires, "--control", "127.0.0.1:1"]) == 2
    assert "is in the past" in capsys.readouterr().err


def test_every_exit_code_is_explained_and_reached() -> None:
    explained = {int(code) for code in re.findall(r"^  (\d+) ", HELP, re.MULTILINE)}
    assert explained == set(map(int, ExitCode)) == {0, 1, *CODES.values()}
    page = (Path(__file__).resolve().parents[4] / "docs" / "cli.md").read_text()
    assert all(f"\n| {code} | " in page for code in explained)


def test_a_key_is_not_revoked_and_no_tenant_deleted_unless_somebody_says_yes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = ("--control", "127.0.0.1:1")
    for command in (("revoke", "key", "k"), ("delete", "tenant", "t")):
        assert run([*command, *nobody]) == 2
        assert run([*command, "--yes", *nobody]) == 5
        with monkeypatch.context() as terminal:
            terminal.setattr("sys.stdin.isatty", lambda: True)
            terminal.setattr("click.confirm", lambda *question, **options: False)
            assert run([*command, *nobody]) == 1
        assert "nothing was changed" in capsys.readouterr().err
