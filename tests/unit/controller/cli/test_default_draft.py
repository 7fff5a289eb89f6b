"""The draft of a stack whose operator named none."""

from __future__ import annotations

import json

import pytest
from outrider_controller.cli.app import run
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import DEFAULT_TARGET, default_draft


def test_a_target_without_a_shipped_draft_is_told_every_way_to_go_on() -> None:
    with pytest.raises(CommandError, match=r"/models/qwen: give --draft-model; or --drafts 0"):
        default_draft("/models/qwen")
    assert default_draft(DEFAULT_TARGET) != DEFAULT_TARGET


@pytest.mark.parametrize(
    ("options", "drafts", "said"),
    [
        ([], 0, "no draft is shipped for /models/qwen: it looks its drafts up itself"),
        (["--drafts", "1"], 1, ""),
        (["--draft-model", "/models/small"], 1, ""),
    ],
    ids=["none given", "a number", "a draft"],
)
def test_a_target_without_a_draft_starts_without_one_unless_it_was_asked_for(
    options: list[str], drafts: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--target-model", "/models/qwen", *options, "--check-config"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["drafts"] == drafts
    assert printed.err.startswith(said) and printed.err.count("\n") == bool(said)


def test_the_shipped_draft_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--check-config"]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"] == 1
