"""What a finished draft is worth: the share of its tokens that the real verifier accepts, on prompts it never saw.

Both models run as they are served, through `outrider.local`. So a draft that learnt from a wrong teacher, or whose file
does not say what was trained, shows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.drafters import DrafterKind, ModelConfig, load_drafter
from outrider.engine import Engine, EngineConfig
from outrider.local import Pair
from outrider.speculation import SamplingParams

# Every proposed token is verified, so that the share depends on no clock and on no policy of serving.
_EVERY_TOKEN = ModelConfig(min_confidence=0.0, num_alternatives=0)
_SAMPLED = SamplingParams(temperature=0.8, seed=0)
_CONCURRENCY = 16
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of first drafted tokens that the target accepted: one is drafted in each step, and verified."""

    greedy: float
    """At temperature 0."""
    sampled: float
    """At temperature 0.8, coupled."""


def measure(target: Engine, draft: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Acceptance:
    """The target answers the prompts with this draft, once at each temperature. Raises CheckpointError."""
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    blocks = _CONCURRENCY * -(-longest // _BLOCK)
    drafter = load_drafter(DrafterKind.MODEL, draft, engine=EngineConfig(num_blocks=blocks), model=_EVERY_TOKEN)
    pair = Pair(target, drafter, max_sequences=_CONCURRENCY, max_draft_tokens=1, row_price=lambda _: 0.0)

    def share(params: SamplingParams | None) -> float:
        answers = pair.answer(prompts, max_new_tokens, speculate=True, params=params)
        verified = sum(answer.num_verified for answer in answers)
        return round(sum(answer.num_accepted for answer in answers) / max(verified, 1), 4)

    return Acceptance(share(None), share(_SAMPLED))
