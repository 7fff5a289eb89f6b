"""The arithmetic of a model's round: how much of which sequence is ingested, and when a proposal ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.config import ModelConfig
from outrider.drafters.sequence import Drafted
from outrider.speculation import Proposal

_CERTAIN = 1 << 16


def plan_ingestion(lags: Sequence[int], config: ModelConfig) -> list[int]:
    """Tokens of each sequence in the round's first forward; it drafts in this round where that is its whole lag.

    Sequences hardly behind go first, in order. What is left goes to those far behind, in order, bounded while
    others wait for their drafts. Work per forward is at most max_batch_tokens, whoever comes or goes.
    """
    counts = [0] * len(lags)
    budget = config.max_batch_tokens
    for number, lag in enumerate(lags):
        if lag <= min(config.ready_lag, budget):
            counts[number] = lag
            budget -= lag
    if any(counts):
        budget = min(budget, config.catch_up_tokens)
    for number, lag in enumerate(lags):
        if not counts[number]:
            counts[number] = min(lag, budget)
            budget -= counts[number]
    return counts


@dataclass(slots=True)
class Chain:
    """A proposal as it grows, token by token, from what stands of the one before."""

    drafted: Drafted
    wanted: int
    """Most tokens; none are added to a chain that has them."""
    min_confidence: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    cut: bool = False
    """Ended before its time."""

    def __len__(self) -> int:
        return len(self.drafted.token_ids)

    @property
    def joint(self) -> float:
        """The draft's own chance that all of it is right."""
        return math.prod(self.drafted.confidence)

    @property
    def ended(self) -> bool:
        tokens = self.drafted.token_ids
        return self.cut or len(tokens) >= self.wanted or (bool(tokens) and tokens[-1] in self.stop_token_ids)

    def add(self, proposal: Proposal) -> None:
        """Takes the token, unless the chain ends before it."""
        if self.joint * _best_chance(proposal) < self.min_confidence:
            self.cut = True
            return
        self.drafted.token_ids.append(proposal.token_id)
        self.drafted.confidence.append(proposal.confidence)
        if proposal.q is not None:
            self.drafted.q.append(proposal.q)


def _best_chance(proposal: Proposal) -> float:
    """The chance by which a chain is cut before this token.

    In ratio mode it is that of q's likeliest token, not of the token drawn: which draws are shown to the verifier
    must not depend on what was drawn, or unlikely tokens would be withheld and the output biased.
    """
    if proposal.q is None:
        return proposal.confidence
    return max(proposal.q.counts) / _CERTAIN
