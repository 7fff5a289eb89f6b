"""Log probabilities of tokens, from the model's own logits: before temperature, penalties and masks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.options.logprobs import TokenLogprobs


def logprobs_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """logits [rows, vocab]; row i is that of token i."""
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    if not num_top:
        return [TokenLogprobs(logprob) for logprob in chosen]
    top = logprobs.topk(min(num_top, logprobs.shape[1]))
    return [
        TokenLogprobs(logprob, tuple(ids), tuple(values))
        for logprob, ids, values in zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    ]
