"""Heads of decoder layers, and such a layer: Llama's, with what Qwen adds. Attention reads a `Memory`, so it knows no
cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.heads.interface import BlockShape, HeadSettings, Memory, TargetParts


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
        self.table = LlamaRotaryEmbedding(settings.rotary)
        # By their names dynamic and longrope tables would change with the longest text of a step.
        self.table.rope_type = "default"

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [batch, tokens] → cos and sin, each [batch, 1, tokens, rotated width]."""
        if self.table.inv_freq.device != positions.device:
            self.table.to(positions.device)
        cos, sin = self.table(torch.empty(0, device=positions.device), positions)
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
        self.scaling = s.head_dim**-0.5
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
        key, value = self.keys_and_values(x, rotary)
        query = self.q_norm(query) if s.qk_norm else query
        query = rotate(query.transpose(1, 2), *rotary).to(value.dtype)
        out = memory.attend(layer, query, key, value).transpose(1, 2)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        read: Tensor = self.o_proj(out.reshape(batch, tokens, -1))
        return read

    def keys_and_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[batch, kv heads, tokens, head_dim]"""
        s, shape = self._settings, (*x.shape[:2], -1, self._settings.head_dim)
        key, value = self.k_proj(x).view(shape), self.v_proj(x).view(shape).transpose(1, 2)
        key = self.k_norm(key) if s.qk_norm else key
        return rotate(key.transpose(1, 2), *rotary).to(value.dtype), value


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

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory, attended: Tensor | None = None
    ) -> Tensor:
        """`attended`: what attention takes instead of the norm of x."""
        attended = self.input_layernorm(x) if attended is None else attended
        x = x + self.self_attn(attended, rotary, memory, self.number)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LayeredHead(nn.Module):
    """A head of decoder layers. A kind says how a token and a feature are joined on their way."""

    kind: str
    recurrent = True
    lookahead = 1
    taps: tuple[int, ...] = ()
    other_taps: tuple[int, ...] = ()
    block: BlockShape | None = None
    """Of a head that fills in whole blocks."""
    early = 0
    """So many layers read the tokens alone, before the join."""
    token_map: Tensor | None
    embed_tokens: nn.Embedding
    projection: Callable[[Tensor], Tensor] | None = None
    """What computes features in the place of torch."""
    passes_normed = True
    """Whether the feature of the next step is taken after the last norm."""

    def __init__(
        self,
        settings: HeadSettings,
        layers: Iterable[nn.Module],
        embedding: Tensor,
        lm_head: nn.Linear,
        token_map: Tensor | None,
    ) -> None:
        """embedding [vocab, width]; token_map [logits width]: the tokens it proposes."""
        super().__init__()
        self.settings = settings
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(settings.width, settings)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding)  # type: ignore[no-untyped-call]
        self.lm_head = lm_head
        self.rotary = Rotary(settings)
        # A buffer, for it goes where the weights go.
        self.register_buffer("token_map", token_map, persistent=False)

    @property
    def logits_width(self) -> int:
        return self.lm_head.out_features

    def reads(self, taps: tuple[int, ...], target_width: int, *, normed: bool = True) -> None:
        """Of the states of these layers it makes one feature; normed: after a norm of each."""
        self.taps = taps
        self.fc = nn.Linear(len(taps) * target_width, self.settings.width, bias=False)
        self.fc_norm = nn.ModuleList(Norm(target_width, self.settings) for _ in taps if normed)

    def features(self, states: Tensor) -> Tensor:
        """[…, taps · target width] → […, width]."""
        if not self.taps:
            return states
        if self.projection is not None:
            return self.projection(states)
        states = states.to(self.fc.weight.dtype)
        if self.fc_norm:
            parts = torch.chunk(states, len(self.taps), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        joined: Tensor = self.fc(states)
        return joined

    def join(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both […, width] → what enters the layers after the early ones, and what the attention of the first of them
        takes instead of the norm of that, […, inputs], if it does."""
        raise NotImplementedError

    def embed(self, token_ids: Tensor) -> Tensor:
        found: Tensor = self.embed_tokens(token_ids)
        return found.to(self.norm.weight.dtype)

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        x, rotary = self.embed(token_ids), self.rotary(positions)
        for layer in self.layers[: self.early]:
            x = layer(x, rotary, memory)
        x, attended = self.join(x, features.to(x.dtype))
        for layer in self.layers[self.early :]:
            x, attended = layer(x, rotary, memory, attended), None
        normed = self.norm(x)
        return (normed if self.passes_normed else x), normed

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.lm_head(hidden)
        return found


def target_rows(target: TargetParts, token_map: Tensor | None) -> nn.Linear:
    """The rows of the target's vocabulary head that a head proposes from, as its own."""
    rows = target.head if token_map is None else target.head[token_map]
    linear = nn.Linear(rows.shape[1], len(rows), bias=False)
    linear.weight = nn.Parameter(rows.clone(), requires_grad=False)
    return linear
