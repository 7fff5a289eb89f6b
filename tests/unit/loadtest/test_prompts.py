"""Files of prompts that a load test takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from outrider_controller.cli.exits import CommandError

from loadtest.prompts import read_prompts

# As in the files that are published.
SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]}
SHARE_GPT = {
    "id": "QWJhYvA_0",
    "conversations": [{"from": "gpt", "value": "Hi!"}, {"from": "human", "value": "Sum it up."}],
}
ANSWER_ALONE = {"id": "QWJhYvA_1", "conversations": [{"from": "gpt", "value": "Hi!"}]}


@pytest.mark.parametrize("array", [True, False], ids=["array", "lines"])
@pytest.mark.parametrize(
    ("rows", "read"),
    [
        ([SPEC_BENCH], [("1", "writing", "Compose a post.")]),
        ([ANSWER_ALONE, SHARE_GPT], [("QWJhYvA_0", "all", "Sum it up.")]),
        (
            [{"prompt": "Why?\u2028How?"}, {"id": 7, "prompt": "When?"}],
            [("1", "all", "Why?\u2028How?"), ("7", "all", "When?")],
        ),
    ],
    ids=["Spec-Bench", "ShareGPT", "prompts without an id"],
)
def test_public_forms_are_read(tmp_path: Path, array: bool, rows: list[Any], read: list[tuple[str, str, str]]) -> None:
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    file = tmp_path / "prompts"
    file.write_text(json.dumps(rows, indent=2) if array else lines, encoding="utf-8")
    assert [(prompt.id, prompt.category, prompt.text) for prompt in read_prompts(file)] == read


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no prompts"),
        (json.dumps([ANSWER_ALONE]), "no prompts"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "row 2"),
        ('{"prompt": "a"}\n{"prompt": \n', "row 2"),
        ('[{"prompt": "a"}, 5]', "row 2"),
        ('[{"prompt": "a"}', "array"),
        ('{"turns": []}', "row 1"),
        ('{"conversations": [{"role": "user", "content": "a"}]}', "row 1"),
    ],
)
def test_a_file_that_is_none_of_prompts_is_refused_with_its_row(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(CommandError, match=named):
        read_prompts(file)
