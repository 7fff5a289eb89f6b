"""Medusa (Cai et al. 2024): residual blocks on the target's last state, each with a vocabulary head for one token
further on. They propose at once, without having seen one another's tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.interface import Memory, TargetParts
from outrider.heads.layer import target_rows


class MedusaBlock(nn.Module):
    def __init__(self, width: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(nn.Module):
    """Block i, on the state of position t, tells the token at t + 2 + i; the target's own head has told t + 1."""

    kind = "medusa"
    recurrent = False
    taps: tuple[int, ...] = ()
    other_taps: tuple[int, ...] = ()
    token_map: Tensor | None

    def __init__(
        self,
        target: TargetParts,
        blocks: int,
        *,
        layers: int = 1,
        bias: bool = True,
        token_map: Tensor | None = None,
        own_heads: bool = False,
    ) -> None:
        """own_heads: each block has a vocabulary head of its own; otherwise all use the target's."""
        super().__init__()
        self.lookahead = blocks
        self.register_buffer("token_map", token_map, persistent=False)
        self.blocks = nn.ModuleList(MedusaBlock(target.width, layers, bias) for _ in range(blocks))
        self.lm_heads = nn.ModuleList(target_rows(target, token_map) for _ in range(blocks if own_heads else 1))

    @property
    def logits_width(self) -> int:
        return len(self.lm_heads[0].weight)  # type: ignore[arg-type]

    def features(self, states: Tensor) -> Tensor:
        return states

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        return features, features

    def logits(self, hidden: Tensor) -> Tensor:
        """[…, width] → [blocks, …, logits width]."""
        hidden = hidden.to(self.lm_heads[0].weight.dtype)  # type: ignore[arg-type]
        last = len(self.lm_heads) - 1
        return torch.stack([self.lm_heads[min(i, last)](block(hidden)) for i, block in enumerate(self.blocks)])
