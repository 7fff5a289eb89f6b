"""Llama and its relatives (families.py) on a CPU: fused projections, weights packed once for oneDNN.

A decode step reads every weight once, so its time is bytes over bandwidth. Packed weights about double the bandwidth
that a plain matrix product reaches, and joined matrices save the overhead of calls. Models of other shapes run through
transformers' own code (`decoder.py`), with the same results.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention import Batch
from outrider.engine.models.families import Family, why_no_relative
from outrider.engine.models.families import Layer as Parts
from outrider.engine.models.taps import HEAD_INPUT, Taps

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


@dataclass(frozen=True, slots=True)
class _Packed:
    """Linear modules of the same inputs, joined to one product."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *linears: Any) -> _Packed:
        joined = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
        weight = torch.ops.mkldnn._reorder_linear_weight(joined.detach().contiguous(), _PACK_FOR_ROWS)
        biased = [linear.bias for linear in linears if linear.bias is not None]
        return cls(weight, torch.cat(biased).detach() if biased else None)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows < _MIN_ROWS:
            x = F.pad(x, (0, 0, 0, _MIN_ROWS - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out[:rows]


def can_fuse(model: Any) -> bool:
    """Whether the model is a Llama, or a relative, on a CPU that oneDNN serves."""
    if model.device.type != "cpu" or why_no_relative(model.config) is not None:
        return False
    if model.dtype == torch.float16 or not torch._C._has_mkldnn:
        return False
    return model.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True)
class _Layer:
    parts: Parts
    """Its norms are used; its matrices were packed."""
    qkv: _Packed
    output: _Packed
    gate_up: _Packed
    down: _Packed

    @classmethod
    def of(cls, parts: Parts) -> _Layer:
        qkv, output = _Packed.of(*parts.qkv), _Packed.of(parts.output)
        packed = cls(parts, qkv, output, _Packed.of(*parts.gate_up), _Packed.of(parts.down))
        return replace(packed, parts=replace(parts, qkv=(), output=None, gate_up=(), down=None))


_Turn = tuple[Tensor, Tensor] | None
"""cos and signed sin of a step's tokens, [tokens, 1, 2, rotated / 2]: rotation is x * cos + swapped halves of x * sin;
None: layers that rotate nothing."""


class FusedLlama:
    """A model rewritten as few, large operations. Takes over its weights."""

    execution = "fused"

    def __init__(self, model: Any, max_context_len: int) -> None:
        family = Family.of(model)
        self._heads, self._kv_heads, self._head_dim = family.heads, family.kv_heads, family.head_dim
        self._eps, self._scale, self._gelu = family.norm_eps, family.scale, family.gelu
        self._embedding_scale, self._logit_scale = family.embedding_scale, family.logit_scale
        self._residual_scale = family.residual_scale
        self._embedding, self._norm = family.embedding, family.norm
        self._head = _Packed.of(family.head)
        self._dtype = model.dtype
        self._layers = [_Layer.of(layer) for layer in family.layers(max_context_len)]

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        x = _scaled(self._embedding[token_ids], self._embedding_scale)
        turns: dict[int, _Turn] = {}
        for number, layer in enumerate(self._layers):
            if taps is not None:
                taps.take(number, x)
            # Layers of a kind share their table.
            if (kind := id(layer.parts.rotary)) not in turns:
                turns[kind] = self._turn(layer.parts.rotary, positions)
            added = self._attention(number, layer, x, turns[kind], batch)
            x = x + self._added(added, layer.parts.attention_post_norm)
            x = x + self._added(self._mlp(layer, x), layer.parts.mlp_post_norm)
        if taps is not None:
            taps.take(len(self._layers), x)
            taps.take(HEAD_INPUT, self._normed(x, self._norm))
        x = self._normed(x[rows], self._norm)
        return _scaled(self._head(x).float(), self._logit_scale), x

    def _attention(self, number: int, layer: _Layer, x: Tensor, turn: _Turn, batch: Batch) -> Tensor:
        tokens, parts, dim = x.shape[0], layer.parts, self._head_dim
        qkv = layer.qkv(self._normed(x, parts.attention_norm))
        keys, values = self._heads * dim, (self._heads + self._kv_heads) * dim
        query, key = self._normed(qkv[:, :keys], parts.query_norm), self._normed(qkv[:, keys:values], parts.key_norm)
        qk = _rotated(torch.cat([query, key], -1).view(tokens, values // dim, dim), turn)
        value = qkv[:, values:].view(tokens, self._kv_heads, dim)
        out = batch.attend(qk[:, : self._heads], qk[:, self._heads :], value, number, self._scale)
        return layer.output(out)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normed(x, layer.parts.mlp_norm)).chunk(2, -1)
        activated = F.gelu(gate, approximate="tanh") if self._gelu else F.silu(gate)
        return layer.down(activated.mul_(up))

    def _added(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What a layer adds to its input."""
        return _scaled(self._normed(x, norm), self._residual_scale)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Each group of as many numbers as there are weights by itself. In the weight's dtype, rounded once."""
        if weight is None:
            return x
        groups = x.to(weight.dtype).reshape(len(x), x.shape[-1] // len(weight), len(weight))
        return F.rms_norm(groups, (len(weight),), weight, self._eps).view(x.shape).to(x.dtype)

    def _turn(self, table: tuple[Tensor, Tensor] | None, positions: Tensor) -> _Turn:
        if table is None:
            return None
        cos, sin = (part[positions].to(self._dtype) for part in table)
        return torch.stack([cos, cos], 1)[:, None], torch.stack([-sin, sin], 1)[:, None]


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


def _rotated(x: Tensor, turn: _Turn) -> Tensor:
    """x [tokens, heads, head_dim]"""
    if turn is None:
        return x
    cos, sin = turn
    count = 2 * cos.shape[-1]
    halves = x[..., :count].view(*x.shape[:2], 2, count // 2)
    rotated = torch.addcmul(halves * cos, halves.flip(2), sin).flatten(2)
    return rotated if count == x.shape[-1] else torch.cat([rotated, x[..., count:]], -1)
