"""Llama and its relatives (families.py) on a GPU: fused projections, and one kernel for all operations between two of
them.

A layer is four matrix products and six small kernels. Models of other shapes run through transformers' own code
(`decoder.py`), which is also recorded in graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.attention import Batch
from outrider.engine.attention.paged import TritonBatch
from outrider.engine.models.families import Family, why_no_relative
from outrider.engine.models.families import Layer as Parts
from outrider.engine.models.taps import HEAD_INPUT, Taps

_GATE_BLOCK = 1024


def can_fuse_on_gpu(model: Any) -> bool:
    """Whether the model is a relative of Llama's of plain weights, without what the kernels do not do."""
    if why_no_relative(model.config) is not None:
        return False
    if any(parameter.dtype != model.dtype for parameter in model.parameters()):
        return False
    family = Family.of(model)
    scales = family.embedding_scale, family.residual_scale, family.logit_scale
    if family.gelu or scales != (1.0, 1.0, 1.0) or type(family.head) is not nn.Linear:
        return False
    return all(_fits(layer, family) for layer in family.layers(1))


def _fits(layer: Parts, family: Family) -> bool:
    linears = (*layer.qkv, layer.output, *layer.gate_up, layer.down)
    norms = layer.attention_norm, layer.mlp_norm
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and layer.attention_post_norm is None
        and all(norm is not None and norm.dtype == linears[0].weight.dtype for norm in norms)
        and all(norm is None or len(norm) == family.head_dim for norm in (layer.query_norm, layer.key_norm))
        and layer.rotary is not None
        and 2 * layer.rotary[0].shape[1] == family.head_dim
    )


@dataclass(frozen=True, slots=True)
class _Joined:
    """Linear modules of the same inputs as one."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *linears: Any) -> _Joined:
        """Frees the modules' weights where they are copied: the model may fill more than half the memory."""
        biased = [linear.bias.detach() for linear in linears if linear.bias is not None]
        bias = torch.cat(biased) if biased else None
        if len(linears) == 1:
            return cls(linears[0].weight.detach(), bias)
        joined = torch.cat([linear.weight.detach() for linear in linears])
        for linear in linears:
            linear.weight = None
        return cls(joined, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: _Joined
    query_norm: Tensor | None
    key_norm: Tensor | None
    rotary: tuple[Tensor, Tensor]
    """cos and sin, [context, head_dim / 2]"""
    output: _Joined
    mlp_norm: Tensor
    gate_up: _Joined
    down: _Joined


class GpuLlama:
    """A model rewritten as few, large operations. Takes its weights from it."""

    execution = "fused-cuda"

    def __init__(self, model: Any, max_context_len: int) -> None:
        family = Family.of(model)
        self._kernels = _load_kernels()
        self._heads, self._kv_heads, self._head_dim = family.heads, family.kv_heads, family.head_dim
        self._eps, self._scale = family.norm_eps, family.scale
        self._embedding, self._norm, self._head = family.embedding, family.norm, _Joined.of(family.head)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers = [self._take(layer, model) for layer in family.layers(max_context_len)]

    def _take(self, layer: Parts, model: Any) -> _Layer:
        assert layer.attention_norm is not None and layer.mlp_norm is not None and layer.rotary is not None
        # Layers of a kind share their table.
        if id(layer.rotary) not in self._tables:
            cos, sin = (table.to(model.device, model.dtype) for table in layer.rotary)
            self._tables[id(layer.rotary)] = cos, sin
        return _Layer(
            attention_norm=layer.attention_norm,
            qkv=_Joined.of(*layer.qkv),
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            rotary=self._tables[id(layer.rotary)],
            output=_Joined.of(layer.output),
            mlp_norm=layer.mlp_norm,
            gate_up=_Joined.of(*layer.gate_up),
            down=_Joined.of(layer.down),
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Decoder. The batch must be Triton's, whose layout has the slots of the keys."""
        if not isinstance(batch, TritonBatch):
            raise TypeError(f"batch: {type(batch).__name__} has no layout on the device")
        residual = F.embedding(token_ids, self._embedding)
        delta = None
        for number, layer in enumerate(self._layers):
            hidden = self._add_norm(residual, delta, layer.attention_norm)
            if taps is not None:
                taps.take(number, residual)
            query = self._rotate_store(layer, layer.qkv(hidden), positions, batch, number)
            delta = layer.output(batch.look(query, number, self._scale))
            hidden = self._add_norm(residual, delta, layer.mlp_norm)
            delta = layer.down(self._gate(layer.gate_up(hidden)))
        normed = self._add_norm(residual, delta, self._norm)
        if taps is not None:
            taps.take(len(self._layers), residual)
            taps.take(HEAD_INPUT, normed)
        x = normed[rows]
        return self._head(x).float(), x

    def _add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """The norm of residual + delta, [tokens, width]; residual becomes that sum."""
        out = torch.empty_like(residual)
        tokens, width = residual.shape
        self._kernels.norm_kernel[(tokens,)](
            residual,
            residual if delta is None else delta,
            weight,
            out,
            self._eps,
            WIDTH=width,
            PADDED=1 << (width - 1).bit_length(),
            ADD=delta is not None,
            num_warps=8 if width > 1024 else 4,
        )
        return out

    def _rotate_store(self, layer: _Layer, qkv: Tensor, positions: Tensor, batch: TritonBatch, number: int) -> Tensor:
        """Writes keys and values to the cache; returns the queries, [tokens, heads, head_dim]."""
        tokens, half = qkv.shape[0], self._head_dim // 2
        query = qkv.new_empty(tokens, self._heads, self._head_dim)
        keys, values = batch.cached(number)
        normed = layer.query_norm is not None
        self._kernels.rotate_store_kernel[(tokens, self._heads + 2 * self._kv_heads)](
            qkv,
            *layer.rotary,
            positions,
            batch.views["slots"],
            layer.query_norm if normed else qkv,
            layer.key_norm if normed else qkv,
            self._eps,
            query,
            keys,
            values,
            keys.stride(0),
            HEADS=self._heads,
            KV_HEADS=self._kv_heads,
            HALF=half,
            HALF_PADDED=1 << (half - 1).bit_length(),
            NORM=normed,
            num_warps=1,
        )
        return query

    def _gate(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        grid = (tokens, -(-width // _GATE_BLOCK))
        self._kernels.gate_kernel[grid](gate_up, out, WIDTH=width, BLOCK=_GATE_BLOCK)
        return out


def _load_kernels() -> ModuleType:
    # Imported here: an engine on a CPU needs no Triton.
    from outrider.engine.models import llama_kernels

    return llama_kernels
