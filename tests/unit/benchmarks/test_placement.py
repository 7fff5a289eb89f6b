"""How tokens of prompts become shares of sequences."""

from __future__ import annotations

from benchmarks.scenarios.placement_real import shares_of


def test_what_a_target_read_before_is_not_in_its_share() -> None:
    assert shares_of({"a": 100, "b": 0}, {"a": 200, "b": 300}) == {"a": 0.25, "b": 0.75}


def test_targets_that_nobody_asked_have_no_share() -> None:
    assert shares_of({"a": 5, "b": 0}, {"a": 5, "b": 0}) == {"a": 0, "b": 0}
