"""What a draft head is: it reads the target's hidden states, and proposes tokens after them.

Positions are counted as EAGLE does: the state of position t and the token after it, at t + 1, together tell what comes
at t + 2. A head that drafts more than one token goes on with its own states in the target's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class HeadError(Exception):
    """A head that cannot be used. Names the file, field or tensor at fault."""

    def __init__(self, at: str, message: str) -> None:
        super().__init__(f"{at}: {message}")
        self.at = at


@dataclass(frozen=True, slots=True)
class TargetParts:
    embedding: Tensor
    """[vocab, width]"""
    head: Tensor
    """[vocab, width]: the target's own vocabulary head."""
    layers: int

    @property
    def width(self) -> int:
        return int(self.embedding.shape[1])


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The decoder layers of a head: a Llama's, as config.json states them."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the MLP."""
    eps: float
    rotary: Any
    """A transformers config from which the rotary table follows."""
    layers: int = 1
    bias: bool = False
    """Whether queries, keys and values have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""
    gated: bool = False
    """Whether attention's output has a gate, as in Qwen3-Next; norms then count from 1."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Of the blocks of a head that fills in whole ones."""

    size: int
    """Tokens of a block, with the one that is known."""
    mask_token_id: int

    def of(self, known: Sequence[int]) -> list[list[int]]:
        """A block after each of these tokens."""
        return [[token, *[self.mask_token_id] * (self.size - 1)] for token in known]


class Memory(Protocol):
    """The keys and values of earlier positions. Training and serving have one each."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [batch, heads, tokens, head_dim]; key, value [batch, kv heads, tokens, head_dim] of the same tokens.

        Remembers keys and values. Returns what the queries read, in their shape."""
        ...


@dataclass(slots=True)
class ChainMemory:
    """One sequence, or several of equal length: tokens attend to all before them, and to themselves."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    """layer → [batch, kv heads, tokens, head_dim]"""

    def remember(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all that it has."""
        if layer in self.keys:
            key = torch.cat([self.keys[layer], key], 2)
            value = torch.cat([self.values[layer], value], 2)
        self.keys[layer], self.values[layer] = key, value
        return key, value

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = self.remember(layer, key, value)
        new, all_of_them = query.shape[2], key.shape[2]
        mask = torch.ones(new, all_of_them, dtype=torch.bool, device=query.device).tril(all_of_them - new)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


class DraftHead(Protocol):
    """A head of any kind. Tensors are [batch, tokens, …]; it keeps no state of its own."""

    kind: str
    """As in `DraftTree.source`."""
    taps: tuple[int, ...]
    """The target's layers whose inputs it reads, joined; empty: the inputs of the target's vocabulary head."""
    other_taps: tuple[int, ...]
    """Those that its files may mean as well; empty: they leave no doubt."""
    token_map: Tensor | None
    """[logits width] the token id of each logit; None when logits cover the vocabulary."""
    recurrent: bool
    """Whether it goes on with its own states. Otherwise it proposes `lookahead` tokens at once."""
    lookahead: int

    @property
    def logits_width(self) -> int: ...

    def features(self, states: Tensor) -> Tensor:
        """The target's states [batch, tokens, taps · width] → what `forward` takes, which is also what a target sends
        over the wire: [batch, tokens, width]."""
        ...

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """token_ids[t] comes after the position of features[t], which is positions[t].

        Returns the features of the next step, and the inputs of `logits`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[…, width] → […, logits width]; of a head with lookahead [lookahead, …, logits width]."""
        ...
