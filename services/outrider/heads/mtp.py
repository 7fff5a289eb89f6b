"""Multi-token prediction (DeepSeek-V3, section 2.2; Qwen3-Next): one state and one token joined, then decoder layers.

Each further token goes through the same layers again, with the head's own output in the place of the target's state;
the target's vocabulary head reads both. Our own heads may begin as a draft model: then they have no norm on the
embedding, and its first layers read the tokens alone, before the state joins them; and they may read states of several
layers of the target, as EAGLE-3 does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.heads.interface import HeadSettings, TargetParts
from outrider.heads.layer import HeadLayer, LayeredHead, Norm, target_rows


class MtpHead(LayeredHead):
    kind = "mtp"

    def __init__(
        self,
        settings: HeadSettings,
        target: TargetParts,
        token_map: Tensor | None = None,
        *,
        norms_tokens: bool = True,
        early: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        """token_map [logits width]: the tokens it proposes; their rows of the target's head are its own. early: so many
        of its layers come before the join. taps: the layers of the target whose states it reads; of none, the inputs of
        the target's vocabulary head."""
        layers = (HeadLayer(settings, number) for number in range(settings.layers))
        super().__init__(settings, layers, target.embedding, target_rows(target, token_map), token_map)
        width = settings.width
        self.enorm: nn.Module = Norm(width, settings) if norms_tokens else nn.Identity()
        self.hnorm = Norm(width, settings)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.early = early
        if taps:
            self.reads(taps, target.width)

    def join(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.eh_proj(torch.cat([self.enorm(tokens), self.hnorm(features)], -1)), None
