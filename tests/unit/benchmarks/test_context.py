"""python -m benchmarks context: the line, and what is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outrider.engine import EngineConfig
from outrider.engine.models.loader import load_engine

from benchmarks.__main__ import run as bench
from benchmarks.scenarios.context import Cost, fitted
from benchmarks.support.lines import least_squares


def test_a_line_through_points_of_a_line_is_that_line() -> None:
    line = least_squares([1, 2, 4], [5, 7, 11])
    assert (round(line.intercept, 9), round(line.slope, 9), round(line.r_squared, 9)) == (3, 2, 1)
    assert line.at(10) == pytest.approx(23)


def test_what_the_line_does_not_explain_lowers_r_squared() -> None:
    assert least_squares([1, 2, 3, 4], [1, 4, 9, 16]).r_squared == pytest.approx(0.9689, abs=1e-3)
    assert least_squares([1, 2, 3], [2, 2, 2]).r_squared == 1
    with pytest.raises(ValueError, match="two different points"):
        least_squares([1, 1], [2, 3])


def test_the_fit_is_of_the_best_times_over_bytes() -> None:
    costs = [Cost(n, n * 1000, best_ms=10 + n, typical_ms=99) for n in (1, 2, 3)]
    assert fitted(costs).slope == pytest.approx(1e-3)


def test_bytes_of_a_position_are_those_of_the_cache(tiny: Path) -> None:
    engine = load_engine(tiny, EngineConfig(dtype="bfloat16", num_blocks=8))
    # 2 layers, 2 key heads of 16, keys and values, 2 bytes each.
    assert engine.kv_bytes_per_token == 2 * 2 * 16 * 2 * 2


def test_the_whole_command_measures_every_context(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["context", "--model", str(tiny), "--rounds", "3", "--json", str(report)]
    code = bench([*arguments, *(f"--context={n}" for n in (16, 33, 128, 500))])
    found = json.loads(report.read_text())
    assert [cost["context"] for cost in found["costs"]] == [16, 33, 128, 500]
    assert all(0 < cost["best_ms"] <= cost["typical_ms"] for cost in found["costs"])
    assert code == (0 if found["holds"] else 1)


def test_a_context_beyond_the_model_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contexts = [f"--context={n}" for n in (16, 128, 513)]
    assert bench(["context", "--model", str(tiny), *contexts]) != 0
    assert "513 tokens, at most 512 fit" in capsys.readouterr().err
