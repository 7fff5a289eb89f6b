"""python -m benchmarks quantization: what it counts, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import run as bench
from benchmarks.scenarios.quantization import Speed, agreement


def test_the_ratio_is_of_the_same_rounds() -> None:
    assert Speed([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]).ratio == 2.0


def test_agreement_is_the_share_of_equal_favourites() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 0, 4]) == 0.75


@pytest.mark.slow
def test_the_whole_command_on_a_tiny_pair(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    file, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    file.write_text("".join(json.dumps({"id": str(n), "prompt": f"say {n}"}) + "\n" for n in range(3)))
    models = ["--target-model", str(tiny), "--draft-model", str(tiny), "--json", str(report)]
    small = ["--prompts", str(file), "--rounds", "3", "--max-tokens", "12", "--dtype", "float32"]
    assert bench(["quantization", *small, *models]) == 0
    found = {(m["role"], m["quantization"]): m for m in json.loads(report.read_text())["measured"]}
    assert set(found) == {(role, how) for role in ("target", "draft") for how in ("none", "int8", "int4")}
    assert found["target", "none"]["agreement"] == 1 == found["draft", "none"]["agreement"]
    assert found["target", "none"]["acceptance"] == 1
    for role in ("target", "draft"):
        sizes = [found[role, how]["weight_bytes"] for how in ("none", "int8", "int4")]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
        # Three tiny answers: eight bits may well change none of their tokens, four do.
        assert 0 < found[role, "int4"]["acceptance"] < found[role, "int8"]["acceptance"] <= 1


def test_a_quantization_that_cannot_run_here_is_refused_by_name(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"id": "1", "prompt": "say"}\n')
    arguments = ["quantization", "--prompts", str(tmp_path / "prompts.jsonl"), "--quantization", "fp8"]
    assert bench([*arguments, "--target-model", str(tiny), "--draft-model", str(tiny)]) == 1
    assert "quantization: fp8 needs a GPU" in capsys.readouterr().err
