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
_MAX_SOURCES = 8
"""Whose trees are kept: a draft worker names its own, and a step merges them all."""


@dataclass(slots=True)
class DraftBuffer:
    """One tree of each source, all of them at the committed length."""

    num_dropped: int = 0
    """Tokens of main guesses dropped since the last commit."""
    answered_len: int = -1
    """The last committed length that a draft worker has answered, with tokens or with none."""
    active: bool = False
    """Whether a draft has answered since drafting was allowed. Before, it may prefill a long prompt: do not wait."""
    _sent: dict[str, DraftTree] = field(default_factory=dict)
    """What draft workers sent, by source: it stays as far as commits agree with it. A chain stays whole, and begins
    before the committed length then."""
    _looked_up: dict[str, DraftTree] = field(default_factory=dict)
    """From sources in this process, which answer each commit anew."""
    _merged: DraftTree | None = None
    _len: int = 0
    """The committed length."""

    def __bool__(self) -> bool:
        """Whether anything is buffered."""
        return bool(self._sent or self._looked_up)

    @property
    def trees(self) -> list[DraftTree]:
        """One of each source that has proposed."""
        return [*self._left().values(), *self._looked_up.values()]

    @property
    def chain(self) -> DraftTree | None:
        """All that is buffered, if it is one chain. It may begin with committed tokens."""
        if len(self._sent) + len(self._looked_up) != 1:
            return None
        [tree] = (self._sent or self._looked_up).values()
        return None if tree.parents else tree

    def merged(self) -> DraftTree | None:
        """Those as one; None without any. Not in ratio mode, which verifies one chain of one source."""
        if self._merged is None and (trees := self.trees):
            self._merged = reduce(DraftTree.merge, trees)
        return self._merged

    def offer(self, tree: DraftTree, committed: Sequence[int], capacity: int) -> None:
        """Buffers what fits of a draft worker's tree, at most `capacity` positions; the rest is dropped and counted."""
        # A message that comes after drafting was disallowed was sent before the draft knew.
        self.active |= capacity > 0
        self.answered_len = max(self.answered_len, min(tree.base_len, len(committed)))
        if not tree.token_ids:
            return
        self._len = len(committed)
        held = self._sent.get(tree.source)
        if held is not None and tree.epoch > held.epoch:
            # The draft has withdrawn its earlier tokens.
            self._drop(tree.source)
            held = None
        full = held is None and len(self._sent) >= _MAX_SOURCES
        placed = None if full else _placed(tree, held and self._left()[tree.source], committed)
        if placed is None:
            self.num_dropped += len(tree.main())
        elif (num_left := len(placed.token_ids) - self._len + placed.base_len) > 0:
            self._sent[tree.source] = placed
            self._merged = None
            if num_left > capacity:
                self._cut(self._left(), capacity)

    def put(self, tree: DraftTree, committed_len: int, capacity: int) -> None:
        """Takes the tree of a source in this process in the place of its last one, unless a commit came between."""
        if tree.token_ids and tree.base_len == committed_len and (kept := tree.upto(capacity)).token_ids:
            self._len = committed_len
            self._looked_up[tree.source] = kept
            self._merged = None

    def has_answer(self, committed_len: int) -> bool:
        """Whether a draft worker has answered the last commit, or what it said before goes on after it."""
        return bool(self._sent) or self.answered_len >= committed_len

    def advance(self, committed: Sequence[int], num_in_step: int) -> None:
        """Follows a commit of `committed`, in which the first `num_in_step` positions were verified.

        What continues the committed tokens stays valid, also after a token that was decoded plainly. All else is
        dropped; of a main guess that failed, the tokens that were not verified are counted.
        """
        self._looked_up.clear()
        self._merged = None
        before, count, tokens = self._len, len(committed), tuple(committed)
        self._len += count
        for source, tree in list(self._sent.items()):
            left: DraftTree | None = tree
            if tree.parents:
                left, guess = tree.after(committed), tuple(tree.guess())
            else:
                done = before - tree.base_len
                if tree.token_ids[done : done + count] == tokens and done + count < len(tree.token_ids):
                    continue
                left, guess = None, tree.token_ids[done:]
            if guess[:count] != tokens[: len(guess)]:
                self.num_dropped += max(0, len(guess) - num_in_step)
            if left is None or not left.token_ids:
                del self._sent[source]
            else:
                self._sent[source] = left

    def _reach(self, tree: DraftTree) -> int:
        """How many tokens its main guess has after the committed ones."""
        return len(tree.main()) if tree.parents else len(tree.token_ids) - self._len + tree.base_len

    def _left(self) -> dict[str, DraftTree]:
        """What draft workers sent, after the committed tokens."""
        for source, tree in self._sent.items():
            if (done := self._len - tree.base_len) > 0:
                self._sent[source] = tree.part(done, len(tree.token_ids))
        return self._sent

    def keep(self, part: Callable[[DraftTree], DraftTree]) -> None:
        """Replaces each tree by a part of it, and counts the tokens that go from guesses of draft workers."""
        self._keep(self._left(), part)
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
        self._cut(self._left(), capacity)
        self._cut(self._looked_up, own_capacity)
        self._merged = None
        self.active &= capacity > 0

    def take_num_dropped(self) -> int:
        count, self.num_dropped = self.num_dropped, 0
        return count

    def _drop(self, source: str) -> None:
        self.num_dropped += self._reach(self._sent.pop(source))
        self._merged = None


def _placed(tree: DraftTree, held: DraftTree | None, committed: Sequence[int]) -> DraftTree | None:
    """What its source has proposed, with this tree; None when the tree fits neither the text nor what is held."""
    if held is not None and tree.epoch < held.epoch:
        return None
    if tree.base_len >= len(committed) and held is None:
        return tree if tree.base_len == len(committed) else None
    if tree.base_len > len(committed):
        return None
    tokens = tuple(committed[tree.base_len :])
    if held is None and not tree.parents:
        return tree if tree.token_ids[: len(tokens)] == tokens[: len(tree.token_ids)] else None
    fresh = tree.after(tokens)
    if fresh is None or held is None or not fresh.token_ids:
        return fresh and (held or fresh)
    if not agree(held.guess(), fresh.guess()) or len(held) + len(fresh) > _MAX_TREE_TOKENS:
        return None
    return held.merge(fresh)
