"""A decoder layer of a head: Llama's, with what Qwen adds. Attention reads a `Memory`, so it knows no cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.drafting.heads.interface import HeadSettings, Memory


class Norm(nn.Module):
    """RMS norm. Qwen3-Next stores its weight as a distance from 1."""

    def __init__(self, width: int, settings: HeadSettings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if settings.gated else torch.ones(width))
        self._offset = float(settings.gated)
        self._eps = settings.eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self._eps)
        return (normed * (self.weight.float() + self._offset)).to(x.dtype)


class Rotary:
    """The rotary table of a config, for the positions asked. No module: a head's dtype would round its frequencies."""

    def __init__(self, settings: HeadSettings) -> None:
        self._table = LlamaRotaryEmbedding(settings.rotary)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [batch, tokens] → cos and sin, each [batch, 1, tokens, rotated width]."""
        cos, sin = self._table(torch.empty(0, device=positions.device), positions)
        return cos[:, None], sin[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, tokens, head_dim]: the first dimensions are rotated, as many as the table has."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-high, low], -1) * sin
    return torch.cat([turned, rest], -1).to(x.dtype)


class HeadAttention(nn.Module):
    def __init__(self, settings: HeadSettings, width_in: int) -> None:
        super().__init__()
        self._settings = s = settings
        queries = s.heads * s.head_dim
        self.q_proj = nn.Linear(width_in, 2 * queries if s.gated else queries, bias=s.bias)
        self.k_proj = nn.Linear(width_in, s.kv_heads * s.head_dim, bias=s.bias)
        self.v_proj = nn.Linear(width_in, s.kv_heads * s.head_dim, bias=s.bias)
        self.o_proj = nn.Linear(queries, s.width, bias=False)
        if s.qk_norm:
            self.q_norm, self.k_norm = Norm(s.head_dim, s), Norm(s.head_dim, s)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory, layer: int) -> Tensor:
        s, (batch, tokens, _) = self._settings, x.shape
        query = self.q_proj(x).view(batch, tokens, s.heads, -1)
        gate = None
        if s.gated:
            query, gate = query.chunk(2, -1)
        key = self.k_proj(x).view(batch, tokens, s.kv_heads, s.head_dim)
        value = self.v_proj(x).view(batch, tokens, s.kv_heads, s.head_dim).transpose(1, 2)
        if s.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotate(each.transpose(1, 2), *rotary).to(value.dtype) for each in (query, key))
        out = memory.attend(layer, query, key, value).transpose(1, 2)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        read: Tensor = self.o_proj(out.reshape(batch, tokens, -1))
        return read


class HeadMLP(nn.Module):
    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(settings.width, settings.inner, bias=False)
        self.up_proj = nn.Linear(settings.width, settings.inner, bias=False)
        self.down_proj = nn.Linear(settings.inner, settings.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadLayer(nn.Module):
    """x → x, [batch, tokens, width]."""

    def __init__(self, settings: HeadSettings, number: int, width_in: int | None = None) -> None:
        """`width_in`: of what attention reads, where that is more than the layer's input."""
        super().__init__()
        self.number = number
        self.self_attn = HeadAttention(settings, width_in or settings.width)
        self.mlp = HeadMLP(settings)
        self.input_layernorm = Norm(settings.width, settings)
        self.post_attention_layernorm = Norm(settings.width, settings)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        return self.after(x, self.input_layernorm(x), rotary, memory)

    def after(self, residual: Tensor, read: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        """As forward, with what attention reads apart from the residual."""
        x = residual + self.self_attn(read, rotary, memory, self.number)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
