"""A model whose next token depends only on the last one, on the real engine, so that every probability is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from outrider.engine import HEAD_INPUT, Engine, EngineConfig, ModelInfo
from outrider.engine.attention import KVCache
from outrider.engine.kv.step import Row
from outrider.heads.interface import Memory
from torch import Tensor

_BLOCK_SIZE = 16


@dataclass(slots=True)
class _ChainDecoder:
    """Needs no cache: the last token is in the row itself."""

    table: Tensor
    execution: str = "chain"
    before: Callable[[], None] = lambda: None
    """Called before each forward."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Any, taps: Any = None
    ) -> tuple[Tensor, Tensor]:
        self.before()
        if taps is not None:
            taps.take(HEAD_INPUT, token_ids[:, None].float())
        return self.table[token_ids[rows]], torch.empty(0)


class _NoAttention:
    def prepare(self, rows: list[Row], cache: KVCache) -> Any:
        return None

    def move(self, moves: Sequence[tuple[int, int]], cache: KVCache) -> None: ...


class _NoCache:
    def wipe(self, *blocks: object) -> None: ...


class ChainEngine(Engine):
    """`table` [token, next token]: logits."""

    def __init__(self, table: Tensor, before: Callable[[], None], *, num_blocks: int, max_context_len: int) -> None:
        chain = _ChainDecoder(table, before=before)
        info = ModelInfo(len(table), max_context_len, _BLOCK_SIZE, num_blocks, "none", "cpu", chain.execution, ())
        config = EngineConfig(dtype="float32", block_size=_BLOCK_SIZE)
        super().__init__(chain, cast(KVCache, _NoCache()), info, config, attention=_NoAttention())


@dataclass(slots=True)
class ChainHead:
    """A draft head for a ChainEngine: it needs the last token only, and says what another table says."""

    table: Tensor
    kind: str = "mtp"
    taps: tuple[int, ...] = ()
    other_taps: tuple[int, ...] = ()
    token_map: Tensor | None = None
    recurrent: bool = True
    lookahead: int = 1

    @property
    def logits_width(self) -> int:
        return self.table.shape[1]

    def features(self, states: Tensor) -> Tensor:
        return states

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        hidden = token_ids[..., None].float()
        # A memory counts the positions that it is shown.
        memory.attend(0, *[hidden[:, None]] * 3)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]
