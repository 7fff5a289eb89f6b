"""outrider set quota: what is no bound is refused before anything is asked, by the option's name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from outrider_controller.cli.change.speculation import set_group


@pytest.mark.parametrize("flag", ["--tokens-per-minute", "--concurrent-requests", "--burst-tokens"])
@pytest.mark.parametrize("value", ["-5", "9" * 30, "1.5", "many", ""])
def test_a_bound_that_no_message_can_hold_is_refused_by_name(flag: str, value: str) -> None:
    found = CliRunner().invoke(set_group, ["quota", "acme", f"{flag}={value}"])
    assert (found.exit_code == 2 and f"{flag}: {value!r}" in found.output) or "nothing to set" in found.output
