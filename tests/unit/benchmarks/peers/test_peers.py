"""The comparison with peers: what is made of samples, and what a peer's process answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.peers import figures, serving


def test_a_ratio_is_of_the_same_rounds_so_a_slow_minute_changes_nothing() -> None:
    ours, peer = [[1.0, 1.0], [4.0, 4.0], [1.0, 1.0]], [[2.0, 2.0], [8.0, 8.0], [2.0, 2.0]]
    assert figures.ratio(ours, peer) == 0.5
    assert figures.ratio(ours[1:], peer[1:]) == 0.5


def test_one_slow_sample_moves_neither_the_ratio_nor_the_minimum() -> None:
    ours, peer = [[1.0, 1.0, 90.0]] * 3, [[2.0, 2.0, 2.0]] * 3
    assert figures.ratio(ours, peer) == 0.5
    assert figures.best(ours) == 1.0
    assert figures.typical(ours) == 1.0


def test_each_peer_is_held_against_ours_in_each_measure() -> None:
    rows = figures.ratio_rows({"decode 1": {"ours": [[1.0, 2.0, 2.0]], "peer": [[4.0, 3.0, 4.0]]}})
    assert rows == [["decode 1", "peer", "2.000", "3.000"]]


def test_disturbed_rounds_are_left_out_unless_all_are() -> None:
    clean, disturbed = {"ours": 0.99, "peer": 0.98}, {"ours": 1.0, "peer": 0.5}
    assert figures.undisturbed([clean, disturbed, clean]) == [0, 2]
    assert figures.undisturbed([disturbed, disturbed]) == [0, 1]
    assert figures.count_undisturbed([disturbed, clean]) == 1


def test_throughput_is_a_batch_over_a_median_step() -> None:
    rows = figures.figure_rows({"decode 16": {"ours": [[50.0, 40.0, 60.0]]}}, {"decode 16": 16})
    assert rows == [["decode 16", "ours", "40.00", "50.00", "320.0"]]


def test_a_peer_answers_by_name_and_says_how_much_of_the_core_it_had() -> None:
    reply = serving.answer({"double": lambda x: {"ms": [2 * x]}}, json.dumps({"do": "double", "x": 4}))
    assert reply["ok"]["ms"] == [8]
    assert reply["ok"]["core_share"] >= 0


@pytest.mark.parametrize("line", ["not json", '{"do": "fail"}', '{"do": "unknown"}', "{}"])
def test_a_failing_measurement_is_an_answer(line: str) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no")

    assert set(serving.answer({"fail": fail}, line)) == {"error"}
