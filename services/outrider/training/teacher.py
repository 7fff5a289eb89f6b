"""The teacher is what the target computes: its logits must follow from what a corpus keeps of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.engine import CheckpointError, Engine, Row

_TOKENS = 24
# bfloat16, or a head in 8 bits, moves logits by less than a hundredth of their length.
_TOLERANCE = 0.03


def check_teacher(engine: Engine, head: Tensor, path: Path) -> None:
    """A corpus keeps the head's inputs, and training multiplies them by `head` [vocab, width]. Raises CheckpointError
    when that is not what the target says: its logits may be scaled, capped or shifted, or its head be another."""
    sequence = engine.kv.open([])
    ids = [7 * number % engine.info.vocab_size for number in range(1, _TOKENS + 1)]
    logits, hidden = engine.forward_with_hidden([Row(sequence, ids, len(ids))])
    difference = torch.inf
    if hidden.shape[-1] == head.shape[-1] and logits.shape[-1] == head.shape[0]:
        difference = float((hidden.float() @ head.float().T - logits).norm() / logits.norm())
    engine.kv.close(sequence)
    # Not a number is no agreement either.
    if not difference < _TOLERANCE:
        raise CheckpointError(
            str(path), "its logits are not its last hidden state times its vocabulary head: no draft can be distilled"
        )
