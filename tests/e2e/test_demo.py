"""The demonstration with a model that no draft is shipped for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outrider_controller.cli.app import run

from tests.unit.engine.test_supported_models import made

pytestmark = pytest.mark.slow


def test_a_model_of_another_family_speculates_by_lookups_and_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "sliding_window": 64,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "max_position_embeddings": 512,
    }
    model, report = made("qwen2", settings, tmp_path / "model"), tmp_path / "report.json"
    options = ["--target-model", str(model), "--max-tokens", "200", "--json", str(report)]
    assert run(["demo", *options, "one two three one two three one two"]) == 0
    found = json.loads(report.read_text())
    assert found["texts_equal"]
    assert found["speculation"]["verified"] > 0
    printed = capsys.readouterr()
    assert "it looks its drafts up itself" in printed.err
    assert "× plain decoding; the texts are equal." in printed.out
