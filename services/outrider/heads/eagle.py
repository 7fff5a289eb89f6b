"""EAGLE-3 (Li et al. 2025): states of a low, a middle and a high layer are joined into one feature of the target's
width; a decoder layer reads it beside the next token, and its output is the feature of the step after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.interface import HeadSettings, TargetParts
from outrider.heads.layer import HeadLayer, LayeredHead, Norm


def default_taps(layers: int) -> tuple[int, ...]:
    """Of a target with this many layers: the layers whose inputs are read, as the paper's code and vLLM have them."""
    return (2, layers // 2, layers - 3)


@dataclass(frozen=True, slots=True)
class EagleVariant:
    """What checkpoints of the field differ in."""

    taps: tuple[int, ...]
    target_width: int
    logits_width: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    """One norm over the joined states."""
    fc_norm: bool = False
    """A norm for each of the joined states."""
    norm_output: bool = False
    """The feature of the next step is taken after the last norm."""
    own_embedding: bool = False


class _FirstLayer(HeadLayer):
    """Attention takes token and feature side by side; the feature alone goes on."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings, 0, 2 * settings.width)
        self.hidden_norm = Norm(settings.width, settings)


class Eagle3Head(LayeredHead):
    kind = "eagle3"

    def __init__(
        self, settings: HeadSettings, variant: EagleVariant, target: TargetParts, token_map: Tensor | None = None
    ) -> None:
        """token_map [logits width]: the token id of each logit, from d2t."""
        width = settings.width
        layers = [_FirstLayer(settings), *(HeadLayer(settings, number) for number in range(1, settings.layers))]
        embedding = torch.empty(target.embedding.shape[0], width) if variant.own_embedding else target.embedding
        super().__init__(settings, layers, embedding, nn.Linear(width, variant.logits_width, bias=False), token_map)
        self.passes_normed = variant.norm_output
        self.variant = variant
        self.reads(variant.taps, variant.target_width, normed=variant.fc_norm)
        if variant.norm_before_fc:
            self.input_norm = Norm(len(variant.taps) * variant.target_width, settings)

    def features(self, states: Tensor) -> Tensor:
        if self.variant.norm_before_fc:
            states = self.input_norm(states.to(self.norm.weight.dtype))
        return super().features(states)

    def join(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        first: Any = self.layers[0]
        normed = first.hidden_norm(features)
        attended = torch.cat([first.input_layernorm(tokens), normed], -1)
        return (normed if self.variant.norm_before_residual else features), attended
