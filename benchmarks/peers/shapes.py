"""Checkpoints of the sizes that people serve, with random weights: how long a step takes does not depend on them.

A model that is larger than wanted gets fewer layers. Its head and each layer keep their sizes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outrider.engine import resolve
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

_TOKENIZER_OF = "smollm2-135m-instruct"
"""Nothing is tokenized, but no engine starts without one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """As a model's config.json says it."""

    model_type: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = True
    window: int | None = None

    def settings(self, layers: int) -> dict[str, Any]:
        return {
            "num_hidden_layers": layers,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "sliding_window": self.window,
            "pad_token_id": None,
        }


SHAPES = {
    "Qwen2.5-0.5B": Shape("qwen2", 24, 896, 4864, 14, 2, 64, 151936),
    "Qwen3-0.6B": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936),
    "Llama-3.2-1B": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256),
    "Mistral-7B-v0.1": Shape("mistral", 32, 4096, 14336, 32, 8, 128, 32000, tied=False, window=4096),
    "Gemma-3-270M": Shape("gemma3_text", 18, 640, 2048, 4, 1, 256, 262144, window=512),
    "Phi-3-mini": Shape("phi3", 32, 3072, 8192, 32, 32, 96, 32064, tied=False, window=2047),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    layers: int
    whole: int
    """Layers of the model that it has the shape of."""
    parameters: int
    """That a step reads: all, without an embedding of its own."""

    @property
    def weight_bytes(self) -> int:
        return 2 * self.parameters


def write(name: str, most_bytes: float, path: Path) -> Checkpoint:
    """In bfloat16, with as many layers as fit, and one at least."""
    shape = SHAPES[name]
    one, two = (_parameters(empty_model(shape, layers)) for layers in (1, 2))
    layers = max(1, min(shape.layers, 1 + int((most_bytes / 2 - one) / (two - one))))
    model = empty_model(shape, layers)
    path.mkdir(parents=True)
    for file in resolve(_TOKENIZER_OF).glob("tokenizer*"):
        shutil.copy(file, path)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    save_file({n: _drawn(p) for n, p in model.named_parameters()}, path / "model.safetensors", {"format": "pt"})
    return Checkpoint(path, layers, shape.layers, _parameters(model))


def empty_model(shape: Shape, layers: int) -> Any:
    """Without memory for its weights."""
    config = AutoConfig.for_model(shape.model_type, **shape.settings(layers))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _parameters(model: Any) -> int:
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    return int(sum(parameter.numel() for parameter in model.parameters()) - embedding)


def _drawn(like: torch.Tensor) -> torch.Tensor:
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    numbers = (0.02 * torch.randn(1 << 20)).bfloat16()
    return numbers.repeat(-(-like.numel() // len(numbers)))[: like.numel()].view(like.shape)
