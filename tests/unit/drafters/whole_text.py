"""A head beside transformers, which reads a whole text at once: what it would propose after each part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outrider.heads.interface import ChainMemory, DraftHead
from outrider.tree import DraftTree
from torch import Tensor
from transformers import AutoModelForCausalLM

TIE = 2e-3
"""Between two logits: a feature on the wire is rounded, and may lie close to the middle between two numbers."""
_DEEPEST = 3
"""Tokens of a proposal that are compared: a head that goes on with its own states multiplies what rounding changed."""


@dataclass(frozen=True)
class WholeText:
    model: Path
    head: DraftHead

    def __post_init__(self) -> None:
        made = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        object.__setattr__(self, "_model", made)

    @torch.inference_mode()
    def features(self, tokens: Sequence[int]) -> Tensor:
        """[positions, width]"""
        states = self._model(torch.tensor([tokens]), output_hidden_states=True).hidden_states  # type: ignore[attr-defined]
        taps = self.head.taps or (-1,)
        found: Tensor = self.head.features(torch.cat([states[tap] for tap in taps], -1))[0]
        return found

    @torch.inference_mode()
    def gap(self, tokens: Sequence[int], proposed: Mapping[int, DraftTree]) -> float:
        """How far, in logits, a token of a greedy proposal is from the one that this head would propose. `proposed`: by
        the length after which it was."""
        features = self.features(tokens).bfloat16().float()[None]
        gaps = [gap for at, tree in proposed.items() for gap in self._gaps(tokens[:at], features[:, : at - 1], tree)]
        return max(gaps, default=0.0)

    def _gaps(self, tokens: Sequence[int], features: Tensor, tree: DraftTree) -> Iterator[float]:
        head, memory, ids = self.head, ChainMemory(), list(tokens[1:])
        start = 0
        for depth, token in enumerate(chain_of(tree)[:_DEEPEST]):
            if depth == 0 or head.recurrent:
                positions = torch.arange(start, start + len(ids))[None]
                following, hidden = head.forward(torch.tensor([ids]), features, positions, memory)
                logits: Any = head.logits(hidden)
                start, ids, features = start + len(ids), [token], following[:, -1:]
            row = logits[0, -1] if head.recurrent else logits[depth, 0, -1]
            at = token if head.token_map is None else head.token_map.tolist().index(token)
            yield float(row.max() - row[at])


def chain_of(tree: DraftTree) -> list[int]:
    """Without the alternatives beside its tokens."""
    parents = tree.parents or range(-1, len(tree.token_ids) - 1)
    found, last = [], -1
    for node, parent in enumerate(parents):
        if parent == last and (not found or node > last):
            found.append(tree.token_ids[node])
            last = node
    return found
