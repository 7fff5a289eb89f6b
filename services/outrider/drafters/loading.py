"""Loads a draft model from a checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from outrider.drafters.adapters import TenantAdapters
from outrider.drafters.interface import Drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.other_vocabulary import OtherVocabulary
from outrider.drafters.vocabulary import OwnVocabulary, Vocabulary
from outrider.drafting.config import ModelConfig
from outrider.engine import Engine, EngineConfig, resolve, tokenizer_fingerprint
from outrider.engine.backends.cpu import runs_natively
from outrider.engine.checkpoints.tokenizer import num_tokens
from outrider.engine.models.adapters import base_of, is_adapter, read_adapter


def load_drafter(
    path: Path,
    *,
    engine: EngineConfig | None = None,
    model: ModelConfig | None = None,
    target: Path | None = None,
    head: Path | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> Drafter:
    """`target`: the target, if its tokens may be others than the model's. `head`: a head's files, whose target is in
    `path`. `adapters`: of the model, by tenant. An adapter in `path` drafts for all. Raises CheckpointError."""
    # Only here: these bring transformers.
    from outrider.drafters.head import HeadDrafter
    from outrider.engine.loading.loader import load_engine

    if head is not None:
        return HeadDrafter.load(head, path, engine or EngineConfig())
    config, whole = engine or EngineConfig(), is_adapter(path)
    if whole:
        path, own = resolve(base_of(path)), path
    if whole or adapters:
        config = _applies_adapters(config)
    loaded = load_engine(path, config)
    adapter_of: Callable[[str], int] = lambda tenant: -1  # noqa: E731
    if whole:
        loaded.adapt([read_adapter(own)])
        adapter_of = lambda tenant: 0  # noqa: E731
    elif adapters:
        adapter_of = TenantAdapters(loaded, adapters).of
    drafter = ModelDrafter(loaded, model or ModelConfig(), _vocabulary(loaded, path, target), adapter_of)
    if loaded.info.device != "cpu":
        drafter.warm_up()
    return drafter


def _applies_adapters(config: EngineConfig) -> EngineConfig:
    """Where our kernels for CPUs do not run, transformers' modules are given them."""
    if runs_natively(config):
        return config
    return replace(config, execution="transformers", cuda_graphs=False)


def _vocabulary(engine: Engine, path: Path, target: Path | None) -> Vocabulary:
    size, token_map = engine.info.vocab_size, engine.token_map
    if target is None or tokenizer_fingerprint(target) == tokenizer_fingerprint(path):
        return OwnVocabulary(size, num_tokens(path), token_map)
    logit_ids = range(size) if token_map is None else token_map.tolist()
    return OtherVocabulary(path, target, logit_ids, engine.info.device)
