"""What a request may ask of log probabilities, and what it hears of them."""

from __future__ import annotations

from dataclasses import dataclass

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
