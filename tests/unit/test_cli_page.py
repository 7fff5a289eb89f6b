"""docs/cli.md says what the commands say of themselves."""

from __future__ import annotations

from tests.cli_page import PAGE, page


def test_the_page_of_commands_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.cli_page"
