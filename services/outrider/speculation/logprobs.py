"""Log probabilities of tokens, by the model's logits as they are: before temperature, penalties and masks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17
"""Of one prompt, the likeliest ones at each position included: some megabyte."""


@dataclass(frozen=True, slots=True)
class LogprobsOptions:
    """What a request wants to hear of them."""

    num_top: int = 0
    """Likeliest tokens at each position, beside the token that came."""
    prompt: bool = False
    """For the prompt's tokens too, but its first."""

    def num_of_prompt(self, prompt_len: int) -> int:
        return (prompt_len - 1) * (1 + self.num_top) if self.prompt else 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """At one position."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    """Likeliest first."""
    top_logprobs: tuple[float, ...] = ()


def logprobs_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """logits [rows, vocab]; token i came after row i."""
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    if not num_top:
        return [TokenLogprobs(logprob) for logprob in chosen]
    top = logprobs.topk(min(num_top, logprobs.shape[1]))
    return [
        TokenLogprobs(logprob, tuple(ids), tuple(values))
        for logprob, ids, values in zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    ]
