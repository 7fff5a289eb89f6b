"""Drafters from checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outrider.drafters import DrafterKind, load_drafter
from outrider.drafting.source import Opening
from outrider.engine import CheckpointError, EngineConfig

Greedy = Callable[..., Opening]
REPEATING = [20, 21, 22, 23, 24, 20, 21, 22]


@pytest.mark.parametrize("kind", list(DrafterKind))
def test_every_kind_loads_from_a_checkpoint_and_says_what_it_is(kind: DrafterKind, tiny: Path, greedy: Greedy) -> None:
    drafter = load_drafter(kind, tiny, engine=EngineConfig(dtype="float32", num_blocks=16))
    assert drafter.info.kind is kind
    assert (drafter.info.vocab_size, drafter.info.max_context_len) == (384, 512)
    [drafted] = drafter.draft([drafter.open(greedy(REPEATING))])
    assert drafted is not None


def test_a_config_without_a_vocabulary_is_refused_by_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_drafter(DrafterKind.NGRAM, tmp_path)
