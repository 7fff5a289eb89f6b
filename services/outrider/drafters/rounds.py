"""The arithmetic of a model's round: how many tokens of each sequence are ingested, and when a proposal ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.drafting.config import ModelConfig
from outrider.speculation import Q_TOTAL, DraftDistribution, Proposal
from outrider.tree import DraftTree
from outrider.tuning import MIN_CHANCE


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


class _Other(NamedTuple):
    reached: float
    """The chance that the target chooses it, with all tokens before it."""
    at: int
    token_id: int
    chance: float


@dataclass(slots=True)
class DraftChain:
    """A proposal as it grows, token by token, from what is still valid of the one before."""

    kept: DraftTree
    wanted: int
    """Most tokens; none are added to a chain that has them."""
    min_confidence: float = 0.0
    """The chain ends when its joint chance is below this."""
    stop_token_ids: frozenset[int] = frozenset()
    token_ids: list[int] = field(init=False)
    chances: list[float] = field(init=False)
    q: list[DraftDistribution] = field(init=False)
    _num_kept: int = field(init=False)
    """Tokens kept from the proposal before."""
    _sent: list[_Other] = field(init=False)
    """Alternatives of the proposal before."""
    _others: list[_Other] = field(default_factory=list)
    """Alternatives to tokens that were added."""

    def __post_init__(self) -> None:
        kept, main = self.kept, self.kept.main()
        self.token_ids, self.q = kept.guess(), list(kept.q)
        self.chances = [kept.chances[node] for node in main] if kept.chances else []
        self._num_kept = len(main)
        # An alternative follows the token before the one in whose place it may come.
        branches = [node for node in range(len(kept)) if node not in main]
        self._sent = [self._other(kept, node, kept.parent(node) + 1) for node in branches]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def joint(self) -> float:
        """The draft's estimate of the chance that all of it is accepted."""
        return math.prod(map(_peak, self.q)) if self.q else math.prod(self.chances)

    @property
    def ended(self) -> bool:
        tokens = self.token_ids
        if len(tokens) >= self.wanted:
            return True
        if self.q and len(tokens) > self._num_kept:
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
        found = [_Other(before * chance, index, token_id, chance) for token_id, chance in proposal.others]
        self._others += [one for one in found if one.reached >= MIN_CHANCE]
        self.token_ids.append(proposal.token_id)
        self.chances.append(proposal.confidence)
        if proposal.q is not None:
            self.q.append(proposal.q)

    def _num_worth_drawing(self, joint: float, peak: float) -> int:
        """Ratio mode: how many tokens to sample. Decided from the first token's distribution before it is sampled, as
        if the others were as certain.

        The sampled tokens must not decide it. They are sent together, so a token followed by many others would be sent
        later than one that ends the draft, arrive too late more often, and be emitted less often than under p.
        """
        if peak == 1 or joint * peak**self.wanted >= self.min_confidence:
            return self.wanted
        return 1 + int(math.log(self.min_confidence / joint) / math.log(peak))

    def tree(self, most: int) -> DraftTree:
        """Its tokens, with the likeliest `most` alternatives to them."""
        others = sorted([*self._sent, *self._others], key=lambda one: -one.reached)[:most]
        chain = range(-1, len(self) - 1)
        return DraftTree(
            self.kept.base_len,
            token_ids=(*self.token_ids, *(one.token_id for one in others)),
            parents=(*chain, *(one.at - 1 for one in others)) if others else (),
            chances=(*self.chances, *(one.chance for one in others)),
            q=tuple(self.q),
            source=self.kept.source,
        )

    def _other(self, kept: DraftTree, node: int, at: int) -> _Other:
        return _Other(math.prod(self.chances[:at]) * kept.chances[node], at, kept.token_ids[node], kept.chances[node])


def _peak(q: DraftDistribution) -> float:
    """The probability of q's likeliest token: in ratio mode a fairer estimate of acceptance than the drawn token's."""
    return max(q.counts) / Q_TOTAL
