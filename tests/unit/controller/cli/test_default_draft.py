"""The draft of a stack whose operator named none."""

from __future__ import annotations

import pytest
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import DEFAULT_TARGET, default_draft


def test_a_target_without_a_shipped_draft_is_told_every_way_to_go_on() -> None:
    with pytest.raises(CommandError, match=r"/models/qwen: give --draft-model, .*--draft-kind ngram; or --drafts 0"):
        default_draft("/models/qwen", "model")
    assert default_draft("/models/qwen", "ngram") == "/models/qwen"
    assert default_draft(DEFAULT_TARGET, "model") != DEFAULT_TARGET
