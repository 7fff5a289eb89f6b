"""A sequence that this draft only follows: what it would propose is compared with what the target commits. Pure.

What is committed does not depend on the draft in greedy and coupled mode, so the comparison says exactly how much of
the proposal would have been accepted; and where the draft in use proposed too, which of the two was better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.tree import ROOT, DraftTree, common_len


@dataclass(slots=True)
class Shadow:
    proposal: DraftTree | None = None
    """Not yet compared to its end."""
    rounds: int = 0
    """At whose beginning both drafts had a proposal. What follows is over these, each as far as the shorter one."""
    accepted_in_use: int = 0
    gained: int = 0
    """What would have been accepted more than that."""
    _committed: list[int] = field(default_factory=list)
    """Since the proposal's base_len."""
    _in_use: tuple[int, int] = (0, 0)
    """Tokens drafted and accepted of the draft in use, on its main path, in the round that began there."""

    def propose(self, tree: DraftTree) -> None:
        self.proposal, self._committed = tree if tree.token_ids else None, []

    def commit(self, base_len: int, token_ids: Sequence[int], in_use: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Verified and accepted tokens of the proposal once that is decided; else 0 and 0."""
        tree = self.proposal
        if tree is None or base_len != tree.base_len + len(self._committed):
            self.proposal = None
            return 0, 0
        if not self._committed:
            self._in_use = in_use
        self._committed.extend(token_ids)
        if (found := _verdict(tree, self._committed)) is None:
            return 0, 0
        self._compare(tree)
        return found

    def end(self) -> None:
        """The text ends here. A proposal that is not decided was right to its end."""
        if self.proposal is not None and self._committed:
            self._compare(self.proposal)

    def _compare(self, tree: DraftTree) -> None:
        """On the main path: what branches beside it the target would have taken is known of the draft in use only."""
        self.proposal = None
        guess, (drafted, accepted_in_use) = tree.guess(), self._in_use
        if shorter := min(len(guess), drafted):
            self.rounds += 1
            self.accepted_in_use += min(accepted_in_use, shorter)
            self.gained += min(common_len(guess, self._committed), shorter) - min(accepted_in_use, shorter)


@dataclass(frozen=True, slots=True)
class ShadowPairs:
    """Sums over sequences, as in the message of this name."""

    sequences: int = 0
    rounds: int = 0
    accepted_in_use: int = 0
    gained: int = 0
    rounds_squared: int = 0
    gained_squared: int = 0
    rounds_gained: int = 0

    def with_ended(self, one: Shadow) -> ShadowPairs:
        if not one.rounds:
            return self
        return ShadowPairs(
            self.sequences + 1,
            self.rounds + one.rounds,
            self.accepted_in_use + one.accepted_in_use,
            self.gained + one.gained,
            self.rounds_squared + one.rounds**2,
            self.gained_squared + one.gained**2,
            self.rounds_gained + one.rounds * one.gained,
        )


def _verdict(tree: DraftTree, committed: Sequence[int]) -> tuple[int, int] | None:
    """None while the committed tokens end inside of the tree."""
    children, node = tree.children(), ROOT
    for accepted, token_id in enumerate(committed):
        if not (following := children[node + 1]):
            return accepted, accepted
        fitting = [child for child in following if tree.token_ids[child] == token_id]
        if not fitting:
            return accepted + 1, accepted
        node = fitting[0]
    return None if children[node + 1] else (len(committed), len(committed))
