"""Loads a drafter of the configured kind from a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from outrider.drafters.config import DrafterKind, ModelConfig
from outrider.drafters.interface import Drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.other_vocabulary import OtherVocabulary
from outrider.drafters.vocabulary import OwnVocabulary, Vocabulary
from outrider.drafting.lookup.ngram import NgramConfig
from outrider.engine import CheckpointError, Engine, EngineConfig, tokenizer_fingerprint
from outrider.engine.checkpoints import read_config
from outrider.engine.vocabulary import num_tokens


def load_drafter(
    kind: DrafterKind,
    path: Path,
    *,
    engine: EngineConfig | None = None,
    model: ModelConfig | None = None,
    ngram: NgramConfig | None = None,
    speaks: Path | None = None,
) -> Drafter:
    """Loads a drafter of this kind from `path`; n-grams alone read no weights. `speaks`: the target, if its tokens may
    be others than the model's. Raises CheckpointError."""
    if kind is DrafterKind.NGRAM:
        return NgramDrafter(*_vocabulary_and_context(path), ngram or NgramConfig())
    # Only here: it brings transformers.
    from outrider.engine.loader import load_engine

    loaded = load_engine(path, engine or EngineConfig())
    return ModelDrafter(loaded, model or ModelConfig(), _vocabulary(loaded, path, speaks))


def _vocabulary(engine: Engine, path: Path, speaks: Path | None) -> Vocabulary:
    size, token_map = engine.info.vocab_size, engine.token_map
    if speaks is None or tokenizer_fingerprint(speaks) == tokenizer_fingerprint(path):
        return OwnVocabulary(size, num_tokens(path), token_map)
    logit_ids = range(size) if token_map is None else token_map.tolist()
    return OtherVocabulary(path, speaks, logit_ids, engine.info.device)


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
