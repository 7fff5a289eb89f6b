"""Which ops ports stand for a process, and what a row says of several turns."""

from __future__ import annotations

from benchmarks.scenarios.startup import Turn, ops_of, row, spread

OPS = {"gateway": "h:1", "control": "h:2", "target-0": "h:3", "router-0": "h:4", "router-1": "h:5"}


def test_a_controller_is_ready_with_its_routers_and_its_control_plane() -> None:
    assert ops_of("controller", OPS) == ["h:2", "h:4", "h:5"]
    assert ops_of("target-0", OPS) == ["h:3"]


def test_a_spread_is_the_median_between_the_least_and_the_most() -> None:
    assert spread([3.0, None, 1.0, 1.5]) == "1.50 (1.00 to 3.00)"
    assert spread([None, 2.0]) == "2.00"
    assert spread([None]) is None


def test_a_row_has_the_turns_of_its_process_alone() -> None:
    turns = [Turn("gateway", ready_s=1.0), Turn("gateway", drain_s=2.0, after_stream_s=0.5), Turn("redis", exit_s=9.0)]
    assert list(row("gateway", turns).values()) == ["gateway", "1.00", None, "2.00", "0.50"]
