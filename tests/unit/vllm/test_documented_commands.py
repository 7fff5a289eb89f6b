"""Commands of docs/bring-your-vllm.md: a draft worker takes them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from outrider.draft.config import parse_arguments
from outrider.engine.checkpoints.fetching import KNOWN_MODELS, hub_model

_ROOT = Path(__file__).parents[3]


def test_the_commands_that_start_a_draft_are_ones_that_it_takes() -> None:
    page = (_ROOT / "docs/bring-your-vllm.md").read_text()
    commands = re.findall(r"^ *outrider draft (.+)$", page, re.MULTILINE)
    assert commands
    for command in commands:
        config = parse_arguments(shlex.split(command))
        assert config.engine.device == "cuda" and _is_named(config.model)
    table = page.partition("| your model | a draft of its family |")[2].partition("\n\n")[0]
    drafts = re.findall(r"`(hf://[^`]+)`", table)
    assert len(drafts) >= 3 and all(map(_is_named, drafts))


def _is_named(model: str) -> bool:
    return model in KNOWN_MODELS or hub_model(model) is not None
