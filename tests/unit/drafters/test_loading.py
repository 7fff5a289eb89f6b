"""Drafters from checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outrider.drafters import load_drafter
from outrider.drafting.source import Opening
from outrider.engine import CheckpointError, EngineConfig
from outrider.training.head_student import HeadLearner
from outrider.training.student import StudentConfig


def test_a_checkpoint_is_a_drafter_with_its_limits(tiny: Path, greedy: Callable[..., Opening]) -> None:
    drafter = load_drafter(tiny, engine=EngineConfig(dtype="float32", num_blocks=16))
    assert (drafter.info.vocab_size, drafter.info.max_context_len) == (384, 512)
    [drafted] = drafter.draft([drafter.open(greedy([20, 21, 22, 23, 24, 20, 21, 22]))])
    assert drafted is not None


def test_a_head_is_loaded_for_its_target_or_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    HeadLearner("medusa", tiny, StudentConfig(), None, "cpu", None).save(tmp_path, str(tiny), {})
    drafter = load_drafter(tiny, head=tmp_path)
    assert (drafter.info.vocab_size, drafter.info.max_context_len) == (384, 512)
    with pytest.raises(CheckpointError, match="head: "):
        load_drafter(tiny, head=tiny)
