"""The drafts of one sequence: proposed tokens for the positions from its committed length on.

Only the target commits tokens. Drafts may arrive late, twice, out of order, or be invented. A draft is trimmed by the
tokens that are committed already, dropped where it does not fit, and never repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

from outrider.tree import DraftTree, agree

_MAX_TREE_TOKENS = 256
"""Tokens kept of one source: it may send trees without end."""


@dataclass(slots=True)
class DraftBuffer:
    """One tree of each source, all of them at the committed length."""

    num_dropped: int = 0
    """Tokens of main guesses dropped since the last commit."""
    declined_len: int = -1
    """The committed length for which a draft last sent an empty proposal."""
    active: bool = False
    """Whether a draft has answered since drafting was allowed. Before, it may prefill a long prompt: do not wait."""
    _sent: dict[str, DraftTree] = field(default_factory=dict)
    """What draft workers sent, by source: it stays as far as commits agree with it."""
    _looked_up: dict[str, DraftTree] = field(default_factory=dict)
    """From sources in this process, which answer each commit anew."""
    _merged: DraftTree | None = None

    @property
    def trees(self) -> list[DraftTree]:
        """One of each source that has proposed."""
        return [*self._sent.values(), *self._looked_up.values()]

    @property
    def num_sent(self) -> int:
        """How far the longest guess of a draft worker reaches."""
        return max((len(tree.main()) for tree in self._sent.values()), default=0)

    def merged(self) -> DraftTree | None:
        """Those as one; None without any. Not in ratio mode, which verifies one chain of one source."""
        if self._merged is None and (trees := self.trees):
            self._merged = reduce(DraftTree.merge, trees)
        return self._merged

    def offer(self, tree: DraftTree, committed: Sequence[int], capacity: int) -> None:
        """Buffers what fits of a draft worker's tree, at most `capacity` positions; the rest is dropped and counted."""
        # A message that comes after drafting was disallowed was sent before the draft knew.
        self.active |= capacity > 0
        if not tree.token_ids:
            self.declined_len = max(self.declined_len, min(tree.base_len, len(committed)))
            return
        held = self._sent.get(tree.source)
        if held is not None and tree.epoch > held.epoch:
            # The draft has withdrawn its earlier tokens.
            self._drop(tree.source)
            held = None
        placed = _placed(tree, held, committed)
        if placed is None:
            self.num_dropped += len(tree.main())
        elif placed.token_ids:
            self._sent[tree.source] = placed
            self._merged = None
            if len(placed) > capacity:
                self._cut(self._sent, capacity)

    def put(self, tree: DraftTree, committed_len: int, capacity: int) -> None:
        """Takes the tree of a source in this process in the place of its last one, unless a commit came between."""
        if tree.token_ids and tree.base_len == committed_len and (kept := tree.upto(capacity)).token_ids:
            self._looked_up[tree.source] = kept
            self._merged = None

    def has_answer(self, committed_len: int) -> bool:
        """Whether a draft worker has answered the last commit, with tokens or with none."""
        return bool(self._sent) or self.declined_len >= committed_len

    def advance(self, committed: Sequence[int], num_in_step: int) -> None:
        """Follows a commit of `committed`, in which the first `num_in_step` positions were verified.

        What continues the committed tokens stays valid, also after a token that was decoded plainly. All else is
        dropped; of a main guess that failed, the tokens that were not verified are counted.
        """
        self._looked_up.clear()
        self._merged = None
        for source, tree in list(self._sent.items()):
            left = tree.after(committed)
            if left is None or tree.parents:
                guess = tree.guess()
                if guess[: len(committed)] != list(committed[: len(guess)]):
                    self.num_dropped += max(0, len(guess) - num_in_step)
            if left is None or not left.token_ids:
                del self._sent[source]
            else:
                self._sent[source] = left

    def keep(self, part: Callable[[DraftTree], DraftTree]) -> None:
        """Replaces each tree by a part of it, and counts the tokens that go from guesses of draft workers."""
        self._keep(self._sent, part)
        self._keep(self._looked_up, part)

    def _cut(self, trees: dict[str, DraftTree], depth: int) -> None:
        self._keep(trees, lambda tree: tree.upto(depth))

    def _keep(self, trees: dict[str, DraftTree], part: Callable[[DraftTree], DraftTree]) -> None:
        for source, tree in list(trees.items()):
            if (kept := part(tree)) is tree:
                continue
            self._merged = None
            if trees is self._sent:
                self.num_dropped += len(tree.main()) - len(kept.main())
            if kept.token_ids:
                trees[source] = kept
            else:
                del trees[source]

    def limit(self, capacity: int, own_capacity: int = 0) -> None:
        """Follows new capacities, of what is sent and of what sources in this process propose; 0 for no drafts."""
        self._cut(self._sent, capacity)
        self._cut(self._looked_up, own_capacity)
        self._merged = None
        self.active &= capacity > 0

    def take_num_dropped(self) -> int:
        count, self.num_dropped = self.num_dropped, 0
        return count

    def _drop(self, source: str) -> None:
        self.num_dropped += len(self._sent.pop(source).main())
        self._merged = None


def _placed(tree: DraftTree, held: DraftTree | None, committed: Sequence[int]) -> DraftTree | None:
    """What its source has proposed, with this tree; None when the tree fits neither the text nor what is held."""
    if held is not None and tree.epoch < held.epoch:
        return None
    fresh = tree.after(committed[tree.base_len :]) if tree.base_len <= len(committed) else None
    if fresh is None:
        return None
    if held is None or not fresh.token_ids:
        return held or fresh
    if not agree(held.guess(), fresh.guess()) or len(held) + len(fresh) > _MAX_TREE_TOKENS:
        return None
    return held.merge(fresh)
