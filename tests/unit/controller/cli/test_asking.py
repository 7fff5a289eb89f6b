"""Options that are numbers: what is none, and what no message can hold, is refused by the option's name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from outrider_controller.cli.app import cli


@pytest.mark.parametrize(
    "words",
    [
        ["top", "--interval", "nan"],
        ["plan", "--acceptance", "nan"],
        ["generate", "hi", "--max-tokens", "99999999999"],
        ["generate", "hi", "--top-k", "99999999999"],
        ["generate", "hi", "--max-draft-tokens", "65"],
        ["demo", "--seed", "9" * 30],
        ["set", "speculation", "acme", "off", "--ttl", "0s"],
    ],
    ids=" ".join,
)
def test_a_number_that_cannot_be_is_refused_by_name(words: list[str]) -> None:
    found = CliRunner().invoke(cli, words)
    assert found.exit_code == 2 and f"'{words[-2]}'" in found.output, found.output
