"""Loads a draft model from a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from outrider.drafters.interface import Drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.other_vocabulary import OtherVocabulary
from outrider.drafters.vocabulary import OwnVocabulary, Vocabulary
from outrider.drafting.config import ModelConfig
from outrider.engine import Engine, EngineConfig, tokenizer_fingerprint
from outrider.engine.checkpoints.tokenizer import num_tokens


def load_drafter(
    path: Path,
    *,
    engine: EngineConfig | None = None,
    model: ModelConfig | None = None,
    target: Path | None = None,
    head: Path | None = None,
) -> Drafter:
    """`target`: the target, if its tokens may be others than the model's. `head`: a head's files, whose target is in
    `path`. Raises CheckpointError."""
    # Only here: these bring transformers.
    from outrider.drafters.head import HeadDrafter
    from outrider.engine.loading.loader import load_engine

    if head is not None:
        return HeadDrafter.load(head, path, engine or EngineConfig())
    loaded = load_engine(path, engine or EngineConfig())
    return ModelDrafter(loaded, model or ModelConfig(), _vocabulary(loaded, path, target))


def _vocabulary(engine: Engine, path: Path, target: Path | None) -> Vocabulary:
    size, token_map = engine.info.vocab_size, engine.token_map
    if target is None or tokenizer_fingerprint(target) == tokenizer_fingerprint(path):
        return OwnVocabulary(size, num_tokens(path), token_map)
    logit_ids = range(size) if token_map is None else token_map.tolist()
    return OtherVocabulary(path, target, logit_ids, engine.info.device)
