"""The draft head of a target: loaded beside the model, and tried on a text that the model writes, before it serves."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.drafting.heads import HeadDrafts, HeadError, TargetParts, load_head
from outrider.drafting.heads.check import self_check
from outrider.drafting.heads.interface import DraftHead
from outrider.engine import CheckpointError, Engine, Row
from outrider.engine.backends.cpu import multiplies_bfloat16
from outrider.engine.checkpoints import read_config
from outrider.engine.draft_checkpoint import read_embedding, read_head
from outrider.engine.taps import HEAD_INPUT

_CHECKED_TOKENS = 48


def head_drafts(engine: Engine, model: Path, head: Path, prompt: list[int]) -> HeadDrafts:
    """The source of drafts of a head, as `tried_head` loads it."""
    return HeadDrafts(tried_head(engine, model, head, prompt))


def tried_head(engine: Engine, model: Path, head: Path, prompt: list[int]) -> DraftHead:
    """The head in `head`, for the model in `model`. `prompt`: what its self-check begins with.

    Raises CheckpointError for a head that does not fit the model.
    """
    settings = read_config(model)
    layers = int(settings.get("text_config", settings)["num_hidden_layers"])
    quick = engine.info.device != "cpu" or multiplies_bfloat16()
    try:
        parts = TargetParts(read_embedding(model), read_head(model), layers)
        loaded = load_head(head, parts, torch.bfloat16 if quick else torch.float32)
    except HeadError as error:
        raise CheckpointError("head", str(error)) from None
    if isinstance(loaded, torch.nn.Module):
        loaded.to(engine.info.device)
    _check(engine, loaded, prompt)
    return loaded


def _check(engine: Engine, head: DraftHead, prompt: list[int]) -> None:
    sequence = engine.kv.open([])
    text, found, pending = list(prompt), [], list(prompt)
    for _ in range(_CHECKED_TOKENS):
        row = Row(sequence, pending, 1, num_tapped=len(pending))
        logits, states = engine.forward_tapped([row], head.taps or (HEAD_INPUT,))
        found.append(states.clone())
        pending = [int(logits[-1].argmax())]
        text += pending
    engine.kv.close(sequence)
    states = torch.cat(found)
    # Prompts are not the model's own words.
    start = len(prompt) - 1
    self_check(head, torch.tensor(text[start:-1], device=states.device), states[start:])
