"""Runs a few tokens through a loaded model in the engine's way, and in transformers' own, with the same weights.

The engine gives all families their positions, windows and scales in one way. One whose code means something else by
them would answer with another text, and without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.checkpoint_files import OTHER_ENGINE
from outrider.engine.engine import Engine
from outrider.engine.kv.step import Row
from outrider.engine.loading.assembly import assemble
from outrider.engine.models.families import FAMILIES
from outrider.engine_config import EngineConfig

PROVEN = {*FAMILIES, "mixtral", "qwen2_moe", "qwen3_moe"}
"""By model_type: those whose answers tests compare, so that they are not compared again at every start. The decoder of
a model of images always is: the whole may do more, or less, with its config."""
_LENGTHS = (45, 30)
_FIRST, _NEXT = 20, 7
"""Tokens of a text in its first step, and in each of those that follow."""
_BOUNDS = {torch.float32: (1.0, 1e-3)}
"""So large a share of the tokens has an error of at most so much, as a part of how much its logits differ among
themselves: rounding explains that."""
# Rounding decides between experts now and then, and that token differs a lot.
_BOUNDS_IN_16_BITS = (0.8, 0.1)


def answers_problem(model: PreTrainedModel, whole: PreTrainedModel, config: EngineConfig, context: int) -> str | None:
    """Why the engine would answer otherwise than transformers; None if it does not.

    `whole`: as transformers loads the checkpoint, of which `model` is the decoder.
    """
    if {model.config.model_type, whole.config.model_type} <= PROVEN:
        return None
    texts = [_text(whole.config, seed, min(length, context)) for seed, length in enumerate(_LENGTHS)]
    try:
        wanted = _by_transformers(whole, texts)
    except Exception as error:  # models fail in many ways
        return f"transformers cannot run it: {error}"
    engine = assemble(
        model,
        replace(config, execution="transformers", quantization="none", prefix_cache=False, cuda_graphs=False),
        num_blocks=sum(-(-len(text) // config.block_size) for text in texts),
        max_context_len=context,
    )
    share, most = _BOUNDS.get(model.dtype, _BOUNDS_IN_16_BITS)
    found = torch.cat(list(map(_error, _by_engine(engine, texts), wanted))).quantile(share)
    if found <= most:
        return None
    return f"its logits here differ from those of transformers, by {found:.2g} of their spread; {OTHER_ENGINE}"


def _text(config: Any, seed: int, length: int) -> list[int]:
    """Token ids that mean nothing to the model's code, as padding and the places of images do."""
    settings = config.get_text_config()
    special = {value for stated in (config, settings) for name, value in vars(stated).items() if name.endswith("_id")}
    drawn = torch.randint(settings.vocab_size, (4 * length,), generator=torch.Generator().manual_seed(seed))
    return [token_id for token_id in drawn.tolist() if token_id not in special][:length]


@torch.inference_mode()
def _by_transformers(whole: PreTrainedModel, texts: list[list[int]]) -> list[Tensor]:
    """The logits of each text, [tokens, vocab]."""
    device = whole.get_input_embeddings().weight.device
    with _own_attention(whole):
        return [
            whole(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0].float() for text in texts
        ]


@contextmanager
def _own_attention(whole: PreTrainedModel) -> Iterator[None]:
    before = whole.config._attn_implementation
    whole.set_attn_implementation("sdpa" if whole._supports_sdpa else "eager")
    try:
        yield
    finally:
        whole.set_attn_implementation(before)


def _by_engine(engine: Engine, texts: list[list[int]]) -> list[Tensor]:
    """As `_by_transformers`: the texts beside one another, step by step over what is cached."""
    sequences = [engine.kv.open([]) for _ in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    while rest := [i for i, text in enumerate(texts) if len(sequences[i].tokens) < len(text)]:
        rows = []
        for i in rest:
            done = len(sequences[i].tokens)
            tokens = texts[i][done : done + (_NEXT if done else _FIRST)]
            rows.append(Row(sequences[i], tokens, len(tokens)))
        logits = torch.split(engine.forward(rows).clone(), [len(row.token_ids) for row in rows])
        for i, part in zip(rest, logits, strict=True):
            found[i].append(part)
    return [torch.cat(parts) for parts in found]


def _error(found: Tensor, wanted: Tensor) -> Tensor:
    """[tokens]"""
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    error: Tensor = (found - wanted).norm(dim=-1) / spread
    return error.nan_to_num(torch.inf)
