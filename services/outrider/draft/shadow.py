"""A sequence that this draft only follows: what it would propose is compared with what the target commits. Pure.

What is committed does not depend on the draft in greedy and coupled mode, so the comparison says exactly how much of
the proposal would have been accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.tree import ROOT, DraftTree


@dataclass(slots=True)
class Shadow:
    proposal: DraftTree | None = None
    """Not yet compared to its end."""
    _committed: list[int] = field(default_factory=list)
    """Since its base_len."""

    def propose(self, tree: DraftTree) -> None:
        self.proposal, self._committed = tree if tree.token_ids else None, []

    def commit(self, base_len: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """Verified and accepted tokens of the proposal once that is decided; else 0 and 0."""
        tree = self.proposal
        if tree is None or base_len != tree.base_len + len(self._committed):
            self.proposal = None
            return 0, 0
        self._committed.extend(token_ids)
        if (found := _verdict(tree, self._committed)) is None:
            return 0, 0
        self.proposal = None
        return found


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
