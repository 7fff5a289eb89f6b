"""One sequence in a drafter: its committed tokens, its outstanding draft, and how long the next may be.

Knows tokens; not how they are drafted, and not the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree, agree


class CommitMismatch(Exception):
    """A commit that does not continue what this sequence holds: a gap, or a contradiction."""


@dataclass(slots=True, eq=False)
class DraftSequence:
    """The committed tokens, and the draft beyond them."""

    spec: SequenceSpec
    limits: Speculation
    tokens: list[int]
    """Prompt and committed output. Only `commit` extends it."""
    guess: DraftTree = field(init=False)
    """The proposal for the positions from committed_len on, as far as no commit contradicted it."""
    epoch: int = 0
    """Incremented each time a draft is discarded: a commit diverged from it, or another draft replaced it."""
    since_s: float = 0.0
    """Monotonic seconds: when the commit or opening came in that the next proposal answers."""
    compute_s: float = 0.0
    """Seconds of the rounds it was part of since its last proposal."""
    share_s: float = 0.0
    """Its share in seconds of all rounds since its last proposal."""

    def __post_init__(self) -> None:
        self.guess = DraftTree(self.committed_len)

    @classmethod
    def start(cls, spec: SequenceSpec) -> DraftSequence:
        return cls(spec, spec.speculation, spec.tokens)

    @property
    def committed_len(self) -> int:
        """Length with the prompt."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Most tokens worth proposing now. The last remaining token is always the target's own."""
        if self.limits.min_chance >= 1:
            return 0
        remaining = self.spec.max_new_tokens - (len(self.tokens) - len(self.spec.prompt))
        return max(0, min(self.limits.max_draft_tokens, remaining - 1))

    def commit(self, base_len: int, token_ids: Sequence[int]) -> None:
        """Appends `token_ids` at position `base_len`. Where they overlap committed tokens they must equal them.

        Raises CommitMismatch, with nothing changed, on a gap or a contradiction.
        """
        if not len(self.spec.prompt) <= base_len <= len(self.tokens):
            raise CommitMismatch(f"commit at {base_len}, but {len(self.tokens)} tokens are held")
        known = self.tokens[base_len : base_len + len(token_ids)]
        if list(token_ids[: len(known)]) != known:
            raise CommitMismatch(f"commit at {base_len} contradicts committed tokens")
        if fresh := list(token_ids[len(known) :]):
            self.tokens.extend(fresh)
            left = self.guess.after(fresh) if agree(self.guess.guess(), fresh) else None
            if left is None:
                self.drop_guess()
            else:
                self.guess = left

    def adopt(self, drafted: DraftTree) -> None:
        """Takes a new proposal as the draft. An empty one leaves the earlier proposal valid."""
        if not drafted.token_ids:
            return
        if not agree(self.guess.guess(), drafted.guess()):
            self.epoch += 1
        self.guess = drafted

    def drop_guess(self) -> None:
        """Discards the draft; the next proposal shows it by its epoch."""
        if self.guess.token_ids:
            self.epoch += 1
        self.guess = DraftTree(self.committed_len)
