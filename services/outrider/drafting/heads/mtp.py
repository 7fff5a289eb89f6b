"""Multi-token prediction (DeepSeek-V3, section 2.2; Qwen3-Next): one state and one token joined, then decoder layers.

Each further token goes through the same layers again, with the head's own output in the place of the target's state.
Our own heads may begin as a draft model: then they have no norm on the embedding, and its first layers read the tokens
alone, before the state joins them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.drafting.heads.interface import HeadSettings, Memory, TargetParts
from outrider.drafting.heads.layer import HeadLayer, Norm, Rotary


class MtpHead(nn.Module):
    kind = "mtp"
    recurrent = True
    lookahead = 1
    # The inputs of the target's vocabulary head.
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        settings: HeadSettings,
        target: TargetParts,
        token_map: Tensor | None = None,
        *,
        norms_tokens: bool = True,
        early: int = 0,
    ) -> None:
        """token_map [logits width]: the tokens it proposes; their rows of the target's head are its own. early: so many
        of its layers come before the join."""
        super().__init__()
        width = settings.width
        self.enorm: nn.Module = Norm(width, settings) if norms_tokens else nn.Identity()
        self.hnorm = Norm(width, settings)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(HeadLayer(settings, number) for number in range(settings.layers))
        self.norm = Norm(width, settings)
        self.embed_tokens = nn.Embedding.from_pretrained(target.embedding)  # type: ignore[no-untyped-call]
        rows = target.head if token_map is None else target.head[token_map]
        self.lm_head = nn.Linear(width, len(rows), bias=False)
        self.lm_head.weight = nn.Parameter(rows.clone(), requires_grad=False)
        self.token_map = token_map
        self.early = early
        self._rotary = Rotary(settings)

    def features(self, states: Tensor) -> Tensor:
        return states

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        x = self.embed_tokens(token_ids)
        rotary = self._rotary(positions)
        for layer in self.layers[: self.early]:
            x = layer(x, rotary, memory)
        x = self.eh_proj(torch.cat([self.enorm(x), self.hnorm(features.to(x.dtype))], -1))
        for layer in self.layers[self.early :]:
            x = layer(x, rotary, memory)
        # As the target's own state: its vocabulary head reads it, and so does the next step.
        out = self.norm(x)
        return out, out

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.lm_head(hidden)
        return found
