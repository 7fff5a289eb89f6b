"""One sequence in a drafter: its committed tokens, its outstanding draft, and how far it may draft ahead.

Knows tokens; not how they are drafted, and not the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.errors import InvalidRequest
from outrider.speculation import DraftDistribution, SamplingParams, VerificationMode


class CommitMismatch(Exception):
    """A commit that does not continue what this sequence holds: a gap, or a contradiction."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How far a sequence's draft may go."""

    max_draft_tokens: int = 0
    """Most tokens of one proposal; 0 pauses the sequence."""
    run_ahead_tokens: int = 0
    """Tokens that may be drafted beyond a proposal before the next commit comes."""
    min_chance: float = 0.0
    """Least joint chance at which the target verifies a token. A chain ends below it; at 1 nothing is proposed."""


@dataclass(frozen=True, slots=True)
class Opening:
    """All that a drafter needs to take over a sequence at any point of its life."""

    prompt: Sequence[int]
    params: SamplingParams
    mode: VerificationMode
    committed: Sequence[int] = ()
    """Output tokens committed so far."""
    limits: DraftLimits = DraftLimits()
    """The limits at the opening."""
    max_new_tokens: int | None = None
    """Output tokens after which the target ends the sequence."""
    stop_token_ids: frozenset[int] = frozenset()
    salt: bytes = b""
    """KV blocks are shared only under equal salts."""
    prediction: Sequence[int] = ()
    """The output that the client expects, in large part."""
    log_fields: Mapping[str, str] = field(default_factory=dict)
    """For log lines about it."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("prompt_token_ids", "must have at least one token")


class Beside(NamedTuple):
    """An alternative to a drafted token."""

    at: int
    """Index of the drafted token."""
    token_id: int
    confidence: float


class Tree(NamedTuple):
    """A proposal as it travels: its own tokens come first."""

    token_ids: list[int]
    parents: list[int]
    """Index of each token's parent, or -1; empty for a chain."""
    confidence: list[float]


@dataclass(slots=True)
class Drafted:
    """A proposal for the positions from the sequence's committed length on. Empty: nothing worth verifying."""

    source: str = ""
    """The part of a combined drafter that made it."""
    token_ids: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    """The drafter's own probability of each token; empty when it has none."""
    q: list[DraftDistribution] = field(default_factory=list)
    """Ratio mode: the distribution each token was sampled from. Empty otherwise."""
    siblings: list[Beside] = field(default_factory=list)
    """Alternatives to the tokens, likeliest first."""
    matched: int = 0
    """For a proposal that continues a match in the text: how many tokens matched before its first one."""

    def begins_with(self, other: Drafted) -> bool:
        return self.token_ids[: len(other.token_ids)] == other.token_ids

    def tree(self) -> Tree:
        """The tokens with their alternatives; a chain if there are none."""
        if not self.siblings:
            return Tree(self.token_ids, [], self.confidence)
        return Tree(
            [*self.token_ids, *(one.token_id for one in self.siblings)],
            [*range(-1, len(self.token_ids) - 1), *(one.at - 1 for one in self.siblings)],
            [*self.confidence, *(one.confidence for one in self.siblings)],
        )

    def section(self, start: int, stop: int | None = None) -> Drafted:
        """The tokens from `start` to `stop` with their probabilities and alternatives."""
        taken = slice(start, stop)
        kept = range(*taken.indices(len(self.token_ids)))
        siblings = [one._replace(at=one.at - start) for one in self.siblings if one.at in kept]
        matched = self.matched + start if self.matched else 0
        return Drafted(self.source, self.token_ids[taken], self.confidence[taken], self.q[taken], siblings, matched)


@dataclass(slots=True, eq=False)
class DraftSequence:
    """The committed tokens, and the draft beyond them."""

    opening: Opening
    limits: DraftLimits
    tokens: list[int]
    """Prompt and committed output. Only `commit` extends it."""
    guess: Drafted = field(default_factory=Drafted)
    """The proposal for the positions from committed_len on, as far as no commit contradicted it."""
    epoch: int = 0
    """Incremented each time a draft is discarded: a commit diverged from it, or another draft replaced it."""

    @classmethod
    def start(cls, opening: Opening) -> DraftSequence:
        return cls(opening, opening.limits, [*opening.prompt, *opening.committed])

    @property
    def committed_len(self) -> int:
        """Length with the prompt."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Most tokens worth proposing now. The last remaining token is always the target's own."""
        return self._within_remaining(self.limits.max_draft_tokens)

    @property
    def reach(self) -> int:
        """Most tokens worth drafting, including those ahead of the next round."""
        return self._within_remaining(self.limits.max_draft_tokens + self.limits.run_ahead_tokens)

    def _within_remaining(self, count: int) -> int:
        if self.limits.min_chance >= 1:
            return 0
        if self.opening.max_new_tokens is None:
            return count
        remaining = self.opening.max_new_tokens - (len(self.tokens) - len(self.opening.prompt))
        return max(0, min(count, remaining - 1))

    def commit(self, base_len: int, token_ids: Sequence[int]) -> None:
        """Appends `token_ids` at position `base_len`. Where they overlap committed tokens they must equal them.

        Raises CommitMismatch, with nothing changed, on a gap or a contradiction.
        """
        if not len(self.opening.prompt) <= base_len <= len(self.tokens):
            raise CommitMismatch(f"commit at {base_len}, but {len(self.tokens)} tokens are held")
        known = self.tokens[base_len : base_len + len(token_ids)]
        if list(token_ids[: len(known)]) != known:
            raise CommitMismatch(f"commit at {base_len} contradicts committed tokens")
        if fresh := list(token_ids[len(known) :]):
            self.tokens.extend(fresh)
            if _agree(self.guess.token_ids, fresh):
                self.guess = self.guess.section(len(fresh))
            else:
                self.drop_guess()

    def adopt(self, drafted: Drafted) -> None:
        """Takes a new proposal as the draft. An empty one leaves the earlier proposal valid."""
        if not drafted.token_ids:
            return
        if not _agree(self.guess.token_ids, drafted.token_ids):
            self.epoch += 1
        self.guess = drafted

    def drop_guess(self) -> None:
        """Discards the draft; the next proposal shows it by its epoch."""
        if self.guess.token_ids:
            self.epoch += 1
        self.guess = Drafted()


def _agree(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether one is a prefix of the other."""
    return all(a == b for a, b in zip(first, second, strict=False))
