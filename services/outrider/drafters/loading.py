"""Loads a drafter of the configured kind from a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from outrider.drafters.config import DrafterKind, ModelConfig
from outrider.drafters.interface import Drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafting.lookup.ngram import NgramConfig
from outrider.engine import CheckpointError, EngineConfig
from outrider.engine.checkpoints import read_config
from outrider.engine.vocabulary import num_tokens


def load_drafter(
    kind: DrafterKind,
    path: Path,
    *,
    engine: EngineConfig | None = None,
    model: ModelConfig | None = None,
    ngram: NgramConfig | None = None,
) -> Drafter:
    """Loads a drafter of this kind from `path`; n-grams alone read no weights. Raises CheckpointError."""
    if kind is DrafterKind.NGRAM:
        return NgramDrafter(*_vocabulary_and_context(path), ngram or NgramConfig())
    # Only here: it brings transformers.
    from outrider.engine.loader import load_engine

    return ModelDrafter(load_engine(path, engine or EngineConfig()), model or ModelConfig(), num_tokens(path))


def _vocabulary_and_context(path: Path) -> tuple[int, int]:
    settings = read_config(path)
    names = ("vocab_size", "max_position_embeddings")
    stated = [settings.get("text_config", settings).get(name) for name in names]
    if not all(isinstance(value, int) for value in stated):
        # Under another name, or left to the family's default, as in GPT-2 and Gemma 3.
        from outrider.engine.loader import read_settings

        stated = [getattr(read_settings(path), name, None) for name in names]
    if not all(isinstance(value, int) for value in stated):
        raise CheckpointError(f"{path}/config.json", f"{', '.join(names)}: missing")
    return stated[0], stated[1]
