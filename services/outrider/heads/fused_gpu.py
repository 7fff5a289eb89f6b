"""A head on a GPU: its layers are those of a Llama, by the same kernels; the join of a token and a feature is two
products, so that nothing is laid side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention import Batch
from outrider.engine.attention.paged import TritonBatch
from outrider.engine.models.fused_gpu import GpuLlama
from outrider.engine.models.products import Product
from outrider.engine.models.taps import HEAD_INPUT, Taps
from outrider.heads.eagle import Eagle3Head
from outrider.heads.layer import LayeredHead
from outrider.heads.mtp import MtpHead


class GpuHead(GpuLlama):
    """Takes its weights from the head."""

    def __init__(self, head: LayeredHead, model: Any, context: int) -> None:
        """model: the head in the form of a Llama."""
        super().__init__(model, context)
        self.features = torch.empty(0)
        self._early, self._passes_normed = head.early, head.passes_normed
        self._norm_of_feature: Tensor | None = None
        if isinstance(head, MtpHead):
            self._tokens, self._features = _halves(head.eh_proj.weight, getattr(head.enorm, "weight", None), head.hnorm)
        else:
            assert isinstance(head, Eagle3Head)
            first: Any = head.layers[0]
            qkv = self._layers[0].qkv
            self._tokens, self._features = _halves(qkv.weight, first.input_layernorm.weight, first.hidden_norm)
            self._tokens = replace(self._tokens, bias=qkv.bias)
            self._norm_of_feature = first.hidden_norm.weight if head.variant.norm_before_residual else None
        self._joins_at_attention = isinstance(head, Eagle3Head)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits and features of the next step, of these rows; the latter are also what is tapped as HEAD_INPUT."""
        assert isinstance(batch, TritonBatch)
        multiply, x = self._multiply, F.embedding(token_ids, self._embedding)
        features = self.features.to(x.dtype)
        for number in range(self._early):
            self.pass_layer(number, x, multiply(x, self._layers[number].qkv), positions, batch)
        joined = multiply(features, self._features, add_to=multiply(x, self._tokens))
        if self._joins_at_attention:
            x, qkv = self._residual(features), joined
        else:
            x, qkv = joined, multiply(joined, self._layers[self._early].qkv)
        self.pass_layer(self._early, x, qkv, positions, batch)
        for number in range(self._early + 1, len(self._layers)):
            self.pass_layer(number, x, multiply(x, self._layers[number].qkv), positions, batch)
        last = x[rows]
        normed = multiply.norm(last, self._norm)
        following = normed if self._passes_normed else last
        if taps is not None:
            taps.found[HEAD_INPUT] = following
        return self._logits(normed, batch), following

    def _residual(self, features: Tensor) -> Tensor:
        """What the first layer of an EAGLE-3 head adds to."""
        if self._norm_of_feature is None:
            return features.clone()
        return self._multiply.norm(features, self._norm_of_feature)


def _halves(weight: Tensor, norm: Tensor | None, feature_norm: Any) -> tuple[Product, Product]:
    """Of a product of token and feature, each after its norm."""
    width = weight.shape[1] // 2
    tokens, features = (half.detach().contiguous() for half in (weight[:, :width], weight[:, width:]))
    norm = None if norm is None else norm.detach()
    return Product(tokens, None, norm), Product(features, None, feature_norm.weight.detach())
