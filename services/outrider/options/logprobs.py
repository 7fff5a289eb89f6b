"""A request's options for log probabilities, and the results."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17
"""Most entries for one prompt, with the likeliest ones at each position: about a megabyte."""


@dataclass(frozen=True, slots=True)
class LogprobsOptions:
    """The log probabilities that a request asks for."""

    num_top: int = 0
    """Likeliest tokens at each position, in addition to the chosen token."""
    prompt: bool = False
    """Also for the prompt's tokens except its first."""

    def num_of_prompt(self, prompt_len: int) -> int:
        return (prompt_len - 1) * (1 + self.num_top) if self.prompt else 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    """Likeliest first."""
    top_logprobs: tuple[float, ...] = ()
