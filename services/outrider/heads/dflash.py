"""DFlash (Chen, Liang and Liu 2026): a few decoder layers fill in a whole block of tokens at once.

The states of several layers of the target, joined to one feature, are the keys and values of the text, in every layer
of the head. A block is the text's last token and then masks, which see the text and one another, whatever their order;
each mask becomes the token of its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.interface import BlockShape, ChainMemory, HeadSettings, Memory, TargetParts
from outrider.heads.layer import HeadAttention, HeadLayer, LayeredHead, Norm


class DFlashHead(LayeredHead):
    kind = "dflash"
    recurrent = False
    block: BlockShape

    def __init__(
        self,
        settings: HeadSettings,
        target: TargetParts,
        taps: tuple[int, ...],
        block: BlockShape,
        *,
        token_map: Tensor | None = None,
        own_embedding: bool = False,
    ) -> None:
        """token_map [logits width]: the token id of each logit, from d2t."""
        layers = [HeadLayer(settings, number) for number in range(settings.layers)]
        embedding = torch.empty(len(target.embedding), settings.width) if own_embedding else target.embedding
        rows = nn.Linear(settings.width, len(target.head) if token_map is None else len(token_map), bias=False)
        super().__init__(settings, layers, embedding, rows, token_map)
        self.block, self.lookahead = block, block.size - 1
        self.reads(taps, target.width, normed=False)
        self.hidden_norm = Norm(settings.width, settings)

    def context(self, features: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each layer the keys and values of these positions of a text, [batch, kv heads, tokens, head_dim]."""
        states, rotary = self.hidden_norm(features.to(self.norm.weight.dtype)), self.rotary(positions)
        for layer in self.layers:
            attention = layer.self_attn
            assert isinstance(attention, HeadAttention)
            yield attention.keys_and_values(states, rotary)

    def fill_in(self, token_ids: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Tokens of blocks → the inputs of `logits` at each of them."""
        x, rotary = self.embed(token_ids), self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotary, memory)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Of one text: [1, tokens, …]. A block after each of its tokens; the inputs of `logits` are [lookahead, 1,
        tokens, width]."""
        assert isinstance(memory, ChainMemory) and len(token_ids) == 1
        known = [memory.remember(number, *pair) for number, pair in enumerate(self.context(features, positions))]
        blocks = torch.tensor(self.block.of(token_ids[0].tolist()), device=token_ids.device)
        at = positions[0][:, None] + torch.arange(1, self.block.size + 1, device=positions.device)
        hidden = self.fill_in(blocks, at, _BlocksMemory(known))
        return features, hidden[:, 1:].transpose(0, 1)[:, None]


@dataclass(frozen=True, slots=True)
class _BlocksMemory:
    """A block after each of the last positions of one text: it sees the positions before it, and itself."""

    known: Sequence[tuple[Tensor, Tensor]]
    """Of each layer keys and values of the text."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        blocks, _, size, _ = query.shape
        keys, values = (
            torch.cat([known.expand(blocks, -1, -1, -1), own], 2)
            for known, own in zip(self.known[layer], (key, value), strict=True)
        )
        seen = torch.ones(blocks, keys.shape[2], dtype=torch.bool, device=query.device)
        seen[:, :-size] = seen[:, :-size].tril(keys.shape[2] - size - blocks)
        return F.scaled_dot_product_attention(query, keys, values, seen[:, None, None], enable_gqa=True)
