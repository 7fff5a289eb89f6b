"""Hidden states that a forward takes on its way, for heads that draft from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

HEAD_INPUT = -1
"""The state that the vocabulary head reads, after the final norm."""


@dataclass(slots=True)
class Taps:
    """What is taken: of the states of some tokens, those that enter some layers."""

    layers: tuple[int, ...]
    """i: the state that enters layer i, after i layers. The number of layers: the one that enters the final norm.
    HEAD_INPUT: the one after it."""
    rows: Tensor
    """Flat indices of the tokens, int64."""
    found: dict[int, Tensor] = field(default_factory=dict)
    """[rows, width] of each layer that was taken."""

    def take(self, layer: int, states: Tensor) -> None:
        """`states` of all tokens, [tokens, width]: kept if they are wanted."""
        if layer in self.layers:
            self.found[layer] = states[self.rows]

    def joined(self) -> Tensor:
        """[rows, len(layers) * width]. Raises ValueError if the model has no such layer."""
        if missing := [layer for layer in self.layers if layer not in self.found]:
            raise ValueError(f"taps: the model has no layer {missing[0]}")
        return torch.cat([self.found[layer] for layer in self.layers], -1)
