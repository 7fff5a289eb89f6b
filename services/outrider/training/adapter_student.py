"""A low-rank adapter as it is trained: a shipped draft that stays as it is, and what is added to its attention.

Its MLP is left alone: there an adapter of the same rank costs a draft's step more than twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.loading.draft_checkpoint import write_recipe
from outrider.engine.models.adapters import save_adapter
from outrider.training.shards import Sample
from outrider.training.student import Scores, TeacherHead, as_student, hidden_states, learn

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
_ALPHA_PER_RANK = 2.0


class _LowRank(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        # It begins as the draft itself.
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out + F.linear(F.linear(x, self.a), self.b) * _ALPHA_PER_RANK


class AdapterLearner:
    """Of a draft model with the target's tokens."""

    def __init__(self, target: Path, token_map: Tensor, device: str, start: Path, base: str, rank: int) -> None:
        """`base`: the draft in `start`, as the adapter's files name it."""
        self.kind = f"adapter-{rank}"
        self.module = as_student(start)
        self.module.requires_grad_(False)
        adapted = [name for name, _ in self.module.named_modules() if name.rpartition(".")[2] in ADAPTED]
        self._low = {name: _LowRank(self.module.get_submodule(name), rank) for name in adapted}
        for name, low in self._low.items():
            self.module.set_submodule(name, low)
        self.module.to(device)
        self.learnable: list[Tensor] = [one for low in self._low.values() for one in (low.a, low.b)]
        self._head, self._base, self._rank = TeacherHead(target, token_map, device), base, rank

    def score(self, samples: Sequence[Sample]) -> Scores:
        return learn(hidden_states(self.module, samples), samples, self._head)

    def save(self, out: Path, base: str, recipe: dict[str, Any]) -> None:
        matrices = {name: (low.a, low.b) for name, low in self._low.items()}
        save_adapter(out, matrices, base=self._base, alpha=_ALPHA_PER_RANK * self._rank)
        write_recipe(out, recipe)
