"""Llama and its relatives: their parts under one set of names, and where they differ as numbers.

Reads loaded models and configs of transformers. Knows nothing of the executions that compute with them (fused.py,
backends/cpu).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outrider.engine.models.context import layer_windows, rotary_parameters

ADDED_TO_NORMS = {"gemma": 1.0, "gemma3_text": 1.0}
"""What a family adds to the weights of its norms."""
FAMILIES = {"llama", "mistral", "smollm3", "qwen2", "qwen3", "phi3", "olmo2", "granite", *ADDED_TO_NORMS}
"""By model_type."""
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Whose frequencies do not depend on a text's length, within the context that is served.
_FIXED_ROTARY = {"default", "linear", "llama3", "yarn", "longrope"}


def why_no_relative(config: Any) -> str | None:
    """None if models of this config consist of the parts below; else what of it differs."""
    if config.model_type not in FAMILIES:
        return f"they run Llama and its relatives, not {config.model_type}"
    kinds = {parameters.get("rope_type", "default") for parameters in rotary_parameters(config)}
    fits = {
        "rope_type": kinds <= _FIXED_ROTARY,
        "hidden_act": _activation(config) in _ACTIVATIONS,
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None) is None,
    }
    wrong = [name for name, fit in fits.items() if not fit]
    return f"they do not take its {', '.join(wrong)}" if wrong else None


def head_dim(config: Any) -> int:
    """Numbers of one head's query, key and value."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _activation(config: Any) -> str:
    # Gemma 3 has no hidden_act.
    return str(getattr(config, "hidden_act", None) or config.hidden_activation)


@dataclass(frozen=True, slots=True)
class Layer:
    """Matrices are linear modules, plain or quantized. Those in a tuple take the same inputs: their outputs follow one
    another.

    Norms are weights, in the model's dtype, or in float32 if the family adds to them; None: what it is for is not
    normed."""

    attention_norm: Tensor | None
    qkv: tuple[Any, ...]
    query_norm: Tensor | None
    """[head_dim], for each head by itself; or of all heads together."""
    key_norm: Tensor | None
    output: Any
    attention_post_norm: Tensor | None
    """Of what attention adds."""
    mlp_norm: Tensor | None
    gate_up: tuple[Any, ...]
    down: Any
    mlp_post_norm: Tensor | None
    """Of what the MLP adds."""
    rotary: tuple[Tensor, Tensor] | None
    """cos and sin in float32, [positions, rotated / 2]: pairs are i and i + rotated / 2 of a head's first numbers."""
    window: int | None
    """How many positions a token looks back at most, its own included; None: all."""


@dataclass(frozen=True, slots=True)
class Family:
    model: Any
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    inner: int
    norm_eps: float
    scale: float
    """Of scores."""
    gelu: bool
    """Whether the gate's activation is GELU, by its tanh, instead of SiLU."""
    embedding_scale: float
    residual_scale: float
    """Of what a layer adds."""
    logit_scale: float

    @classmethod
    def of(cls, model: Any) -> Family:
        """Raises no error: ask `why_no_relative` before."""
        config = model.config
        return cls(
            model=model,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            width=config.hidden_size,
            inner=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            scale=float(model.model.layers[0].self_attn.scaling),
            gelu=_activation(config) != "silu",
            embedding_scale=_embedding_scale(model),
            residual_scale=getattr(config, "residual_multiplier", 1.0),
            logit_scale=1 / getattr(config, "logits_scaling", 1.0),
        )

    @property
    def embedding(self) -> Tensor:
        """[vocab, width]"""
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    @property
    def head(self) -> Any:
        """The vocabulary's linear module."""
        return self.model.get_output_embeddings()

    @property
    def norm(self) -> Tensor:
        """Of the head's inputs; as those of a layer."""
        return self._norm(self.model.model.norm)

    def layers(self, positions: int) -> Iterator[Layer]:
        """In their order, with rotary tables of so many positions."""

        @cache
        def rotary(*kind: str) -> tuple[Tensor, Tensor]:
            # In float32; transformers would round the table to the model's dtype.
            at = torch.arange(positions, device="meta" if self.embedding.is_meta else "cpu")[None]
            tables = self.model.model.rotary_emb(at.new_empty(0, dtype=torch.float32), at, *kind)
            cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in tables)
            return cos, sin

        by_kind = hasattr(self.model.model.rotary_emb, "layer_types")
        for layer, window in zip(self.model.model.layers, layer_windows(self.model.config), strict=True):
            kind = (layer.self_attn.layer_type,) if by_kind else ()
            rotated = getattr(layer.self_attn, "use_rope", True)
            yield self._layer(layer, rotary(*kind) if rotated else None, window)

    def _layer(self, layer: Any, rotary: tuple[Tensor, Tensor] | None, window: int | None) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        # Models that norm what a layer adds use the name of Llama's norm before the MLP for the one after attention.
        norms_added = hasattr(layer, "post_feedforward_layernorm")
        before_mlp = "pre_feedforward_layernorm" if norms_added else "post_attention_layernorm"
        return Layer(
            attention_norm=self._norm_of(layer, "input_layernorm"),
            qkv=_either(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"),
            query_norm=self._norm_of(attention, "q_norm"),
            key_norm=self._norm_of(attention, "k_norm"),
            output=attention.o_proj,
            attention_post_norm=self._norm(layer.post_attention_layernorm) if norms_added else None,
            mlp_norm=self._norm_of(layer, before_mlp),
            gate_up=_either(mlp, "gate_up_proj", "gate_proj", "up_proj"),
            down=mlp.down_proj,
            mlp_post_norm=self._norm_of(layer, "post_feedforward_layernorm"),
            rotary=rotary,
            window=window,
        )

    def _norm_of(self, owner: Any, name: str) -> Tensor | None:
        module = getattr(owner, name, None)
        return None if module is None else self._norm(module)

    def _norm(self, module: Any) -> Tensor:
        weight: Tensor = module.weight.detach()
        added = ADDED_TO_NORMS.get(self.model.config.model_type)
        return weight if added is None else weight.float() + added


def _either(owner: Any, fused: str, *split: str) -> tuple[Any, ...]:
    return tuple(getattr(owner, name) for name in ((fused,) if hasattr(owner, fused) else split))


def _embedding_scale(model: Any) -> float:
    """In the model's dtype, if the embedding itself scales: as it was trained. NaN if that is not known, on meta."""
    embedding = model.get_input_embeddings()
    by_embedding = getattr(embedding, "embed_scale", None)
    if by_embedding is not None and by_embedding.is_meta:
        return math.nan
    scale = 1.0 if by_embedding is None else float(by_embedding.to(embedding.weight.dtype))
    return scale * float(getattr(model.config, "embedding_multiplier", 1.0))
