"""The draft head of a target: loaded beside the model, and tried on a text that the model writes, before it serves."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.engine import CheckpointError, Engine, EngineConfig, Row
from outrider.engine.backends import cpu
from outrider.engine.models.taps import HEAD_INPUT
from outrider.heads import HeadDrafts, HeadError, HeadFeatures
from outrider.heads.check import choose_taps, self_check
from outrider.heads.decoders import read_natively
from outrider.heads.engine import HeadEngine, head_engine
from outrider.heads.interface import DraftHead
from outrider.heads.loading import load_head_of

_CHECKED_TOKENS = 48


def head_drafts(engine: Engine, head: DraftHead, max_tokens: int = 5) -> HeadDrafts:
    """The source of drafts of a head that `tried_head` has loaded. Raises CheckpointError."""
    engine.record_taps(head.taps or (HEAD_INPUT,))
    return HeadDrafts(head, max_tokens, engine_of(engine, head))


def head_features(engine: Engine, head: DraftHead, bits: int = 16) -> HeadFeatures:
    """What sends a head on draft workers its features, with so many bits a number."""
    engine.record_taps(head.taps or (HEAD_INPUT,))
    if engine.info.execution.startswith("native"):
        read_natively(head, cpu.load_kernels())
    return HeadFeatures(head.kind, head.taps, head.features, bits)


def engine_of(engine: Engine, head: DraftHead, *, prefix_cache: bool = True) -> HeadEngine | None:
    """Runs a head as its target is run, with at most as many blocks. Raises CheckpointError."""
    info = engine.info
    config = EngineConfig(
        device=info.device,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        prefix_cache=prefix_cache,
        cuda_graphs=engine.records,
        execution="auto" if info.execution.startswith("native") else "transformers",
    )
    return head_engine(head, config, info.max_context_len)


def tried_head(engine: Engine, model: Path, head: Path, prompt: list[int]) -> DraftHead:
    """The head in `head`, for the model in `model`. `prompt`: what its self-check begins with.

    Raises CheckpointError for a head that does not fit the model.
    """
    try:
        loaded, _ = load_head_of(model, head, engine.info.device)
    except HeadError as error:
        raise CheckpointError("head", str(error)) from None
    _check(engine, loaded, prompt)
    return loaded


def _check(engine: Engine, head: DraftHead, prompt: list[int]) -> None:
    taps = head.taps or (HEAD_INPUT,)
    layers = tuple(dict.fromkeys([*taps, *head.other_taps]))
    sequence = engine.kv.open([])
    text, found, pending = list(prompt), [], list(prompt)
    for _ in range(_CHECKED_TOKENS):
        row = Row(sequence, pending, 1, num_tapped=len(pending))
        logits, states = engine.forward_tapped([row], layers)
        found.append(states.clone())
        pending = [int(logits[-1].argmax())]
        text += pending
    engine.kv.close(sequence)
    # Prompts are not the model's own words.
    start = len(prompt) - 1
    states = torch.cat(found)[start:]
    ids = torch.tensor(text[start:-1], device=states.device)
    by_layer = dict(zip(layers, states.chunk(len(layers), -1), strict=True))
    choose_taps(head, ids, by_layer)
    self_check(head, ids, torch.cat([by_layer[tap] for tap in head.taps or taps], -1))
