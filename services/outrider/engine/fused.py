"""Llama-shaped decoders on a CPU: fused projections, weights packed once for oneDNN.

A decode step reads every weight once, so its time is bytes over bandwidth. Packed weights about double the bandwidth
that a plain matrix product reaches, and joined matrices save the overhead of calls. Models of other shapes run through
transformers' own code (`decoder.py`), with the same results.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from outrider.engine.attention import Batch
from outrider.engine.taps import HEAD_INPUT, Taps

# The batch size that oneDNN packs for; the layout serves every other size too.
_PACK_FOR_ROWS = 8
# Fewer rows are padded to this many. oneDNN's product of one to three rows is slower than that of four, by a sixth for
# the wider matrices. And its product of a single row sums more than 1024 columns in another order, so a token's logits
# would depend on whether it was verified together with others.
_MIN_ROWS = 4


def keep_to_vector_code() -> None:
    """Before the first matrix product of the process, because oneDNN reads this once: on a CPU with AMX it would
    multiply more than 32 rows on tiles, whose sums differ in bits from those of its vector code."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def _pack(*weights: Tensor) -> Tensor:
    joined = torch.cat(weights) if len(weights) > 1 else weights[0]
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(joined.detach().contiguous(), _PACK_FOR_ROWS)
    return packed


def _linear(x: Tensor, packed: Tensor) -> Tensor:
    rows = x.shape[0]
    if rows < _MIN_ROWS:
        x = F.pad(x, (0, 0, 0, _MIN_ROWS - rows))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out[:rows]


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, some of them joined."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def is_plain_llama(model: nn.Module) -> TypeGuard[LlamaForCausalLM]:
    """Whether the model is a Llama without biases, with a fixed rotary table."""
    if not isinstance(model, LlamaForCausalLM):
        return False
    config = model.config
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    biased = config.attention_bias or config.mlp_bias
    return rope in ("default", "linear", "llama3") and config.hidden_act == "silu" and not biased


def can_fuse(model: nn.Module) -> bool:
    """Whether the model is a plain Llama on a CPU that oneDNN serves."""
    if not is_plain_llama(model) or model.device.type != "cpu":
        return False
    if model.dtype == torch.float16 or not torch._C._has_mkldnn:
        return False
    return model.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class FusedLlama:
    """A LlamaForCausalLM rewritten as few, large operations. Takes over the model's weights."""

    execution = "fused"

    def __init__(self, model: LlamaForCausalLM, max_context_len: int) -> None:
        config = model.config
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = config.head_dim
        self._width: int = config.hidden_size
        self._eps: float = config.rms_norm_eps
        self._scale = float(self._head_dim) ** -0.5
        self._embedding = model.get_input_embeddings().weight.detach()
        self._norm = model.model.norm.weight.detach()
        self._head = _pack(model.get_output_embeddings().weight)
        self._cos, self._sin = self._rotary_table(model, max_context_len)
        self._layers = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self._layers.append(
                Layer(
                    layer.input_layernorm.weight.detach(),
                    _pack(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
                    _pack(attention.o_proj.weight),
                    layer.post_attention_layernorm.weight.detach(),
                    _pack(mlp.gate_proj.weight, mlp.up_proj.weight),
                    _pack(mlp.down_proj.weight),
                )
            )

    @staticmethod
    def _rotary_table(model: LlamaForCausalLM, length: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [length, 1, 2, head_dim / 2]: rotation is x * cos + swapped halves of x * sin."""
        position = torch.arange(length)[None]
        like = torch.empty(0, dtype=model.dtype)
        cos, sin = model.model.rotary_emb(like, position)
        shape = (length, 1, 2, cos.shape[-1] // 2)
        signed = sin[0].view(shape).clone()
        signed[:, :, 0].neg_()
        return cos[0].view(shape).contiguous(), signed

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        x = self._embedding[token_ids]
        cos, sin = self._cos[positions], self._sin[positions]
        for number, layer in enumerate(self._layers):
            if taps is not None:
                taps.take(number, x)
            x = x + self._attention(number, layer, x, cos, sin, batch)
            hidden = F.rms_norm(x, (self._width,), layer.mlp_norm, self._eps)
            gate, up = _linear(hidden, layer.gate_up).chunk(2, -1)
            x = x + _linear(F.silu(gate).mul_(up), layer.down)
        if taps is not None:
            taps.take(len(self._layers), x)
            taps.take(HEAD_INPUT, F.rms_norm(x, (self._width,), self._norm, self._eps))
        x = F.rms_norm(x[rows], (self._width,), self._norm, self._eps)
        return _linear(x, self._head).float(), x

    def _attention(self, number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        tokens, rotated = x.shape[0], self._heads + self._kv_heads
        hidden = F.rms_norm(x, (self._width,), layer.attention_norm, self._eps)
        qkv = _linear(hidden, layer.qkv).view(tokens, -1, 2, self._head_dim // 2)
        qk = qkv[:, :rotated]
        qk = torch.addcmul(qk * cos, qk.flip(2), sin).view(tokens, rotated, self._head_dim)
        value = qkv[:, rotated:].view(tokens, self._kv_heads, self._head_dim)
        out = batch.attend(qk[:, : self._heads], qk[:, self._heads :], value, number, self._scale)
        return _linear(out, layer.output)
