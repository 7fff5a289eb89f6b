"""The arithmetic of a model's round: how much of which sequence is ingested, and when a proposal ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.config import ModelConfig
from outrider.drafters.sequence import Drafted
from outrider.speculation import Q_TOTAL, DraftDistribution, Proposal


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
        """The draft's estimate of the chance that all of it is accepted."""
        drafted = self.drafted
        return math.prod(map(_peak, drafted.q)) if drafted.q else math.prod(drafted.confidence)

    @property
    def ended(self) -> bool:
        tokens = self.drafted.token_ids
        return self.cut or len(tokens) >= self.wanted or (bool(tokens) and tokens[-1] in self.stop_token_ids)

    def add(self, proposal: Proposal) -> None:
        """Takes the token, unless the chain ends before it."""
        chance = proposal.confidence if proposal.q is None else _peak(proposal.q)
        if self.drafted.token_ids and self.joint * chance < self.min_confidence:
            self.cut = True
            return
        self.drafted.token_ids.append(proposal.token_id)
        self.drafted.confidence.append(proposal.confidence)
        if proposal.q is not None:
            self.drafted.q.append(proposal.q)


def _peak(q: DraftDistribution) -> float:
    """The probability of q's likeliest token: in ratio mode, a fair estimate of the chance of acceptance.

    That of the token drawn would not be one, and must not decide: if unlikely draws were withheld from the verifier,
    what it is shown would no longer be drawn from q, and the output would be biased.
    """
    return max(q.counts) / Q_TOTAL
