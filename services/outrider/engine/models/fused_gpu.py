"""Llama and its relatives (families.py) on a GPU: fused projections, and one kernel for all operations between two of
them.

A layer is four matrix products, a kernel that rotates and stores, and the two of attention. Models of other shapes run
through transformers' own code (`decoder.py`), which is also recorded in graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.attention import Batch
from outrider.engine.attention.paged import TritonBatch
from outrider.engine.checkpoints.quantization import Float8Linear, Int8Linear
from outrider.engine.models.families import Family, why_no_relative
from outrider.engine.models.families import Layer as Parts
from outrider.engine.models.products import Product, Products
from outrider.engine.models.taps import HEAD_INPUT, Taps


def can_fuse_on_gpu(model: Any) -> bool:
    """Whether the model is a relative of Llama's of plain weights or of 8 bits, without what the kernels do not do."""
    if why_no_relative(model.config) is not None:
        return False
    if any(parameter.dtype != model.dtype for parameter in model.parameters()):
        return False
    family = Family.of(model)
    scales = family.embedding_scale, family.residual_scale, family.logit_scale
    if family.gelu or scales != (1.0, 1.0, 1.0) or not _multiplied([family.head], model.dtype):
        return False
    return all(_fits(layer, family) for layer in family.layers(1))


def _fits(layer: Parts, family: Family) -> bool:
    groups = layer.qkv, (layer.output,), layer.gate_up, (layer.down,)
    norms = layer.attention_norm, layer.mlp_norm
    return (
        all(_multiplied(group, family.embedding.dtype) for group in groups)
        and layer.attention_post_norm is None
        and all(norm is not None and norm.dtype == family.embedding.dtype for norm in norms)
        and all(norm is None or len(norm) == family.head_dim for norm in (layer.query_norm, layer.key_norm))
        and layer.rotary is not None
        and 2 * layer.rotary[0].shape[1] == family.head_dim
    )


def _multiplied(joined: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether linear modules can be one product. Those of 8 bits are multiplied in 16."""
    kind, *others = {type(linear) for linear in joined}
    return not others and (kind is nn.Linear or (kind in (Int8Linear, Float8Linear) and dtype != torch.float32))


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Product
    query_norm: Tensor | None
    key_norm: Tensor | None
    rotary: tuple[Tensor, Tensor]
    """cos and sin, [context, head_dim / 2]"""
    output: Product
    gate_up: Product
    down: Product


class GpuLlama:
    """A model rewritten as few, large operations. Takes its weights from it."""

    def __init__(self, model: Any, max_context_len: int, *, invariant: bool = True) -> None:
        family = Family.of(model)
        self._multiply = Products.of(family.norm_eps, model.dtype, invariant=invariant)
        self._kernels = self._multiply.kernels
        self.execution = "fused-cuda-invariant" if self._multiply.invariant else "fused-cuda"
        self._heads, self._kv_heads, self._head_dim = family.heads, family.kv_heads, family.head_dim
        self._eps, self._scale = family.norm_eps, family.scale
        self._embedding, self._norm, self._head = family.embedding, family.norm, Product.of(family.head)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers = [self._take(layer, model) for layer in family.layers(max_context_len)]
        if any(layer.down.scales is not None for layer in self._layers):
            # Scaled after the sum, not before it: other bits than of the same weights, widened.
            self.execution += "-w8"

    def _take(self, layer: Parts, model: Any) -> _Layer:
        assert layer.attention_norm is not None and layer.mlp_norm is not None and layer.rotary is not None
        # Layers of a kind share their table.
        if id(layer.rotary) not in self._tables:
            cos, sin = (table.to(model.device, model.dtype) for table in layer.rotary)
            self._tables[id(layer.rotary)] = cos, sin
        return _Layer(
            qkv=Product.of(*layer.qkv, norm=layer.attention_norm),
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            rotary=self._tables[id(layer.rotary)],
            output=Product.of(layer.output),
            gate_up=Product.of(*layer.gate_up, norm=layer.mlp_norm),
            down=Product.of(layer.down),
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Decoder. The batch must be Triton's, whose layout has the slots of the keys."""
        if not isinstance(batch, TritonBatch):
            raise TypeError(f"batch: {type(batch).__name__} has no layout on the device")
        residual = F.embedding(token_ids, self._embedding)
        for number, layer in enumerate(self._layers):
            if taps is not None:
                taps.take(number, residual)
            self.pass_layer(number, residual, self._multiply(residual, layer.qkv), positions, batch)
        if taps is not None:
            taps.take(len(self._layers), residual)
            taps.take(HEAD_INPUT, self._multiply.norm(residual, self._norm))
        x = self._multiply.norm(residual[rows], self._norm)
        return self._logits(x, batch), x

    def _logits(self, x: Tensor, batch: TritonBatch) -> Tensor:
        """Of a recorded step where the runner wants them."""
        out = batch.views.get("logits")
        if out is None:
            out = x.new_empty(len(x), len(self._head.weight), dtype=torch.float32)
        return self._multiply(x, self._head, out=out)

    def pass_layer(self, number: int, residual: Tensor, qkv: Tensor, positions: Tensor, batch: TritonBatch) -> None:
        """Adds what a layer adds. qkv: what its attention makes of its inputs."""
        layer, multiply = self._layers[number], self._multiply
        query = self._rotate_store(layer, qkv, positions, batch, number)
        multiply(batch.look(query, number, self._scale), layer.output, add_to=residual)
        multiply(multiply(residual, layer.gate_up, gate=True), layer.down, add_to=residual)

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
