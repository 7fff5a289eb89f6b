"""The arithmetic of a model's round: how many tokens of each sequence are ingested, and when a proposal ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafters.config import ModelConfig
from outrider.drafters.sequence import Beside, Drafted
from outrider.speculation import Q_TOTAL, DraftDistribution, Proposal

# An alternative less likely than this is not worth its bytes on any target.
_MIN_CHANCE = 0.02


def plan_ingestion(lags: Sequence[int], config: ModelConfig) -> list[int]:
    """Tokens of each sequence in the round's first forward. A sequence drafts in this round if that is its whole lag.

    Sequences hardly behind go first, in order. What is left goes to those far behind, in order, and is bounded while
    others wait for their drafts. A forward has at most max_batch_tokens.
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
    """A proposal as it grows, token by token, from what is still valid of the one before."""

    drafted: Drafted
    wanted: int
    """Most tokens; none are added to a chain that has them."""
    min_confidence: float = 0.0
    """The chain ends when its joint chance is below this."""
    stop_token_ids: frozenset[int] = frozenset()
    _num_kept: int = field(init=False)
    """Tokens kept from the proposal before."""
    _others: list[tuple[float, Beside]] = field(default_factory=list)
    """Alternatives to tokens that were added, each with the chance that the target chooses it."""

    def __post_init__(self) -> None:
        self._num_kept = len(self)

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
        if len(tokens) >= self.wanted:
            return True
        if self.drafted.q and len(tokens) > self._num_kept:
            # Its length was decided before the first new token was sampled.
            return False
        return bool(tokens) and (tokens[-1] in self.stop_token_ids or self.joint < self.min_confidence)

    def add(self, proposal: Proposal) -> None:
        """Takes the token, whatever its chance: its forward is paid for, and verifying it is almost free.

        In ratio mode it must not be withheld: the tokens that the verifier sees would no longer be sampled from q.
        """
        index, before = len(self), self.joint
        if proposal.q is not None and index == self._num_kept:
            self.wanted = min(self.wanted, index + self._num_worth_drawing(before, _peak(proposal.q)))
        found = [(before * chance, Beside(index, token_id, chance)) for token_id, chance in proposal.others]
        self._others += [pair for pair in found if pair[0] >= _MIN_CHANCE]
        self.drafted.token_ids.append(proposal.token_id)
        self.drafted.confidence.append(proposal.confidence)
        if proposal.q is not None:
            self.drafted.q.append(proposal.q)

    def _num_worth_drawing(self, joint: float, peak: float) -> int:
        """Ratio mode: how many tokens to sample. Decided from the first token's distribution before it is sampled, as
        if the others were as certain.

        The sampled tokens must not decide it. They are sent together, so a token followed by many others would be sent
        later than one that ends the draft, arrive too late more often, and be emitted less often than under p.
        """
        if peak == 1 or joint * peak**self.wanted >= self.min_confidence:
            return self.wanted
        return 1 + int(math.log(self.min_confidence / joint) / math.log(peak))

    def take_siblings(self, most: int) -> None:
        """Keeps the likeliest `most` alternatives to its tokens."""
        sent = [(self._reached(one.at) * one.confidence, one) for one in self.drafted.siblings]
        ranked = sorted([*sent, *self._others], key=lambda pair: -pair[0])
        self.drafted.siblings = [one for _, one in ranked[:most]]
        self._others.clear()

    def _reached(self, index: int) -> float:
        return math.prod(self.drafted.confidence[:index])


def _peak(q: DraftDistribution) -> float:
    """The probability of q's likeliest token: in ratio mode a fairer estimate of acceptance than the drawn token's."""
    return max(q.counts) / Q_TOTAL
