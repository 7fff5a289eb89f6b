"""Llama-shaped decoders on a GPU: fused projections, and one kernel for all operations between two of them.

A layer is four matrix products and six small kernels. Models of other shapes run through transformers' own code
(`decoder.py`), which is also recorded in graphs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from outrider.engine.attention import Batch
from outrider.engine.attention.paged import TritonBatch
from outrider.engine.fused import Layer, is_plain_llama
from outrider.engine.taps import HEAD_INPUT, Taps

_GATE_BLOCK = 1024


def can_fuse_on_gpu(model: nn.Module) -> bool:
    """Whether the model is a Llama without biases, of plain weights, with a fixed rotary table."""
    return (
        is_plain_llama(model)
        and all(type(module) is nn.Linear for name, module in model.named_modules() if name.endswith("_proj"))
        and all(parameter.dtype == model.dtype for parameter in model.parameters())
    )


class GpuLlama:
    """A LlamaForCausalLM rewritten as few, large operations. Takes the model's weights from it."""

    execution = "fused-cuda"

    def __init__(self, model: LlamaForCausalLM, max_context_len: int) -> None:
        config = model.config
        self._kernels = _load_kernels()
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = config.head_dim
        self._eps: float = config.rms_norm_eps
        self._scale = float(self._head_dim) ** -0.5
        self._embedding = model.get_input_embeddings().weight.detach()
        self._norm = model.model.norm.weight.detach()
        self._head = model.get_output_embeddings().weight.detach()
        self._cos, self._sin = self._rotary_table(model, max_context_len)
        self._layers = [self._take(layer) for layer in model.model.layers]

    @staticmethod
    def _take(layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        taken = Layer(
            layer.input_layernorm.weight.detach(),
            _join(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.o_proj.weight.detach(),
            layer.post_attention_layernorm.weight.detach(),
            _join(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj.weight.detach(),
        )
        # Joined weights are copies, so originals are freed layer by layer: the model may fill more than half the
        # memory.
        for owner, names in ((attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj"))):
            for name in names:
                delattr(owner, name)
        return taken

    @staticmethod
    def _rotary_table(model: LlamaForCausalLM, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [length, head_dim / 2] each."""
        device = model.device
        cos, sin = model.model.rotary_emb(torch.empty(0, dtype=model.dtype, device=device), _positions(length, device))
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

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
            query = self._rotate_store(F.linear(hidden, layer.qkv), positions, batch, number)
            delta = F.linear(batch.look(query, number, self._scale), layer.output)
            hidden = self._add_norm(residual, delta, layer.mlp_norm)
            delta = F.linear(self._gate(F.linear(hidden, layer.gate_up)), layer.down)
        normed = self._add_norm(residual, delta, self._norm)
        if taps is not None:
            taps.take(len(self._layers), residual)
            taps.take(HEAD_INPUT, normed)
        x = normed[rows]
        return F.linear(x, self._head).float(), x

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

    def _rotate_store(self, qkv: Tensor, positions: Tensor, batch: TritonBatch, layer: int) -> Tensor:
        """Writes keys and values to the cache; returns the queries, [tokens, heads, head_dim]."""
        tokens, half = qkv.shape[0], self._head_dim // 2
        query = qkv.new_empty(tokens, self._heads, self._head_dim)
        keys, values = batch.cached(layer)
        self._kernels.rotate_store_kernel[(tokens, self._heads + 2 * self._kv_heads)](
            qkv,
            self._cos,
            self._sin,
            positions,
            batch.views["slots"],
            query,
            keys,
            values,
            keys.stride(0),
            HEADS=self._heads,
            KV_HEADS=self._kv_heads,
            HALF=half,
            HALF_PADDED=1 << (half - 1).bit_length(),
            num_warps=1,
        )
        return query

    def _gate(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        grid = (tokens, -(-width // _GATE_BLOCK))
        self._kernels.gate_kernel[grid](gate_up, out, WIDTH=width, BLOCK=_GATE_BLOCK)
        return out


def _join(*projections: nn.Linear) -> Tensor:
    return torch.cat([projection.weight.detach() for projection in projections])


def _positions(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)[None]


def _load_kernels() -> ModuleType:
    # Imported here: an engine on a CPU needs no Triton.
    from outrider.engine import llama_kernels

    return llama_kernels
