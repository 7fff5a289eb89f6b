"""DFlash written out in plain torch, on a whole text at once, and its files with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, INNER, THETA, EPS = 4, 2, 32, 80, 5000.0, 1e-5
BLOCK, MASK, LAYERS = 6, 7, 2


@dataclass(frozen=True)
class Formula:
    """Of a head without a vocabulary of its own."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    embedding: Tensor
    rows: Tensor
    """[logits width, width]"""

    @classmethod
    def random(
        cls, embedding: Tensor, rows: Tensor, layer_ids: tuple[int, ...] = (1, 3, 4), std: float = 0.1
    ) -> Formula:
        """layer_ids: of the target, whose outputs are read."""
        width = embedding.shape[1]
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, width),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, width),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, width),
            "self_attn.o_proj": (width, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, width),
            "mlp.up_proj": (INNER, width),
            "mlp.down_proj": (width, INNER),
        }
        norms = {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        norms |= {"input_layernorm": width, "post_attention_layernorm": width}
        tensors = {"fc.weight": torch.randn(width, len(layer_ids) * width) * std}
        tensors |= {f"{name}.weight": torch.rand(width) + 0.5 for name in ("hidden_norm", "norm")}
        for layer in range(LAYERS):
            tensors |= {f"layers.{layer}.{name}.weight": torch.randn(shape) * std for name, shape in shapes.items()}
            tensors |= {f"layers.{layer}.{name}.weight": torch.rand(size) + 0.5 for name, size in norms.items()}
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": BLOCK,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(layer_ids)},
            "hidden_size": width,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "vocab_size": len(embedding),
        }
        return cls(config, tensors, embedding, rows)

    def write(self, path: Path) -> Path:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        save_file({name: value.contiguous() for name, value in self.tensors.items()}, path / "model.safetensors")
        return path

    def logits(self, states: Tensor, last: int) -> Tensor:
        """states [positions, taps · width] of a text but for its last token → [BLOCK - 1, logits width]."""
        text = _norm(states @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"])
        x = self.embedding[[last] + [MASK] * (BLOCK - 1)]
        for number in range(LAYERS):
            layer = {
                name.removeprefix(f"layers.{number}.").removesuffix(".weight"): value
                for name, value in self.tensors.items()
                if name.startswith(f"layers.{number}.")
            }
            x = x + self._attention(layer, text, _norm(x, layer["input_layernorm"]))
            normed = _norm(x, layer["post_attention_layernorm"])
            gate = torch.nn.functional.silu(normed @ layer["mlp.gate_proj"].T)
            x = x + (gate * (normed @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
        return _norm(x, self.tensors["norm.weight"])[1:] @ self.rows.T

    def _attention(self, layer: dict[str, Tensor], text: Tensor, block: Tensor) -> Tensor:
        both, first = torch.cat([text, block]), len(text)

        def heads(name: str, x: Tensor, count: int, start: int) -> Tensor:
            out = (x @ layer[f"self_attn.{name}_proj"].T).view(len(x), count, HEAD_DIM)
            return out if name == "v" else _turned(_norm(out, layer[f"self_attn.{name}_norm"]), start)

        query = heads("q", block, HEADS, first)
        key, value = (heads(name, both, KV_HEADS, 0).repeat_interleave(HEADS // KV_HEADS, 1) for name in "kv")
        weights = (torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD_DIM)).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).reshape(len(block), -1) @ layer["self_attn.o_proj"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _turned(x: Tensor, start: int) -> Tensor:
    """x [tokens, heads, head_dim], at the positions from `start` on."""
    half = HEAD_DIM // 2
    angles = torch.arange(start, start + len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
