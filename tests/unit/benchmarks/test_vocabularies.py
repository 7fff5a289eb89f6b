"""python -m benchmarks vocabularies, with a model that is the target under other ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import run as bench
from tests.unit.drafters.test_other_vocabulary import twins

__all__ = ["twins"]
"""A fixture."""


def test_a_twin_with_other_ids_is_always_right_and_the_texts_are_equal(
    twins: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, twin = twins
    monkeypatch.setattr("benchmarks.scenarios.vocabularies.DEFAULT_TARGET", str(target))
    prompts, found = tmp_path / "prompts.jsonl", tmp_path / "found.json"
    texts = ["".join(map(chr, range(start, start + 20))) for start in (0x4E00, 0x4E40)]
    prompts.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts)))
    command = ["vocabularies", "--prompts", str(prompts), "--other", str(twin), "--json", str(found)]
    assert bench([*command, "--max-tokens", "24", "--dtype", "float32"]) == 0
    for measured in json.loads(found.read_text())["measured"]:
        assert measured["acceptance"] == 1.0 and measured["rounds_with_a_draft"] > 0
        assert measured["texts_equal"] == measured["texts"] == 2
