"""Drafters from checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.drafters import load_drafter
from outrider.drafting.source import Opening
from outrider.engine import EngineConfig


def test_a_checkpoint_is_a_drafter_with_its_limits(tiny: Path, greedy: Callable[..., Opening]) -> None:
    drafter = load_drafter(tiny, engine=EngineConfig(dtype="float32", num_blocks=16))
    assert (drafter.info.vocab_size, drafter.info.max_context_len) == (384, 512)
    [drafted] = drafter.draft([drafter.open(greedy([20, 21, 22, 23, 24, 20, 21, 22]))])
    assert drafted is not None
