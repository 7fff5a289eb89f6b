"""An engine on which only the step thread's work is left: steps are laid out as for recorded ones, and nothing runs.

One token is chosen, whatever came before, and goes through the verification of a GPU's steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from outrider.engine import Engine, EngineConfig
from outrider.engine.attention import KVCache
from outrider.engine.engine import ModelInfo
from outrider.engine.kv.step import Step
from outrider.engine.run.buckets import Bucket, make_buckets
from outrider.engine.run.graphs import StepInputs
from outrider.speculation import batched, verification
from outrider.speculation.batched import verify_batched
from torch import Tensor

TOKEN = 7
"""What the model says."""
_VOCABULARY = 32
_SURE = 500.0
"""Its logit: enough for thousands of penalties, and not so much that exponentials of the others' underflow, for which a
CPU takes twenty times as long."""


class _Nothing:
    """In the place of recorded steps."""

    def __init__(self, buckets: tuple[Bucket, ...], max_blocks: int) -> None:
        self.buckets = buckets
        self._inputs = StepInputs(buckets, 4, max_blocks, 0, torch.device("cpu"))
        self._said = torch.zeros(max(bucket.tokens for bucket in buckets), _VOCABULARY)
        self._said[:, TOKEN] = _SURE
        self._logits = torch.empty_like(self._said)

    def run(self, step: Step, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if step.num_tokens <= len(self._logits):
            self._inputs.send(step)
        logits = self._logits[: len(step.wanted)].copy_(self._said[: len(step.wanted)])
        return logits, logits[:0]


def _choose(logits: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    found = torch.zeros(len(logits), 2, dtype=torch.int64)
    found[:, 0] = TOKEN
    return found


def null_engine(rows: int, context: int, max_batch_tokens: int) -> Engine:
    """For `rows` sequences of at most `context` tokens."""
    # Without a GPU, rows would be verified one by one; and no kernel runs.
    verification.verify_rows = verify_batched
    vars(batched)["choose"] = _choose
    config = EngineConfig(num_blocks=rows * (context // 16 + 1), graph_rows=rows, max_batch_tokens=max_batch_tokens)
    assert config.num_blocks is not None
    info = ModelInfo(_VOCABULARY, context, config.block_size, config.num_blocks, "none", "cpu", "none", ())
    nothing: Any = _Nothing(make_buckets(rows, max_batch_tokens), context // config.block_size + 1)
    cache = KVCache(*(torch.zeros(1, 1, config.block_size, 1) for _ in range(2)))
    return Engine(nothing, cache, info, config, graphs=nothing)
