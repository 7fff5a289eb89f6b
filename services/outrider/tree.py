"""A draft is a tree of proposed tokens: sources make it, messages carry it, verification walks it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.errors import InvalidRequest
from outrider.options.sampling import DraftDistribution

ROOT = -1
"""As a parent: the last token before the tree."""
_UNKNOWN = 0.5
"""The chance of a token whose source gives none."""


# Nobody changes one. It is not frozen, because that takes four times as long, and a step makes some for each sequence.
@dataclass(slots=True)
class DraftTree:
    """Proposed tokens after position base_len - 1. Node i follows node parents[i], or the last committed token (-1).

    Checked at birth: raises InvalidRequest. The path of first children is the draft's main guess.
    """

    base_len: int
    """Position of the first tokens; a position counts from the first prompt token."""
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Empty: a chain. A parent comes before its child."""
    chances: tuple[float, ...] = ()
    """The source's own probability of each token, given its parent. Empty: it has none."""
    q: tuple[DraftDistribution, ...] = ()
    """Ratio mode, a chain only: the distribution that each token was drawn from."""
    source: str = ""
    """The kind of source: model, ngram, prediction, …"""
    matched: int = 0
    """Tokens of the match that it continues; 0 for a proposal of another kind."""
    epoch: int = 0
    """A source raises it when it takes back what it proposed before."""
    serial: int = 0
    """Number of the message that brought it; 0 without one."""
    seconds: float = 0.0
    """Time that its source spent on it."""
    origins: tuple[DraftTree, ...] = field(default=(), compare=False, repr=False)
    """The tree that proposed each token, in a tree that was made of others; empty in one from a source."""
    bins: Sequence[Any] | None = field(default=None, init=False, compare=False, repr=False)
    """Of each token that of calibration, once it was asked for: steps look at a tree again and again."""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if self.parents:
            self._check_parents(count)
        if self.chances:
            self._check_chances(count)
        if self.q:
            self._check_q(count)

    def _check_parents(self, count: int) -> None:
        if len(self.parents) != count:
            raise InvalidRequest("parents", f"must be one per token, got {len(self.parents)} for {count}")
        if any(not ROOT <= parent < child for child, parent in enumerate(self.parents)):
            raise InvalidRequest("parents", "a parent must come before its child")

    def _check_chances(self, count: int) -> None:
        if len(self.chances) != count:
            raise InvalidRequest("confidence", f"must be one per token, got {len(self.chances)} for {count}")
        # The sum, because NaN would pass the other checks. A 32-bit float may be rounded to more than 1.
        if not (min(self.chances) >= 0 and max(self.chances) <= 1.0001 and sum(self.chances) >= 0):
            raise InvalidRequest("confidence", "not a probability")

    def _check_q(self, count: int) -> None:
        if self.parents:
            raise InvalidRequest("parents", "trees are not verified in ratio mode")
        if len(self.q) != count:
            raise InvalidRequest("q", f"must be one per token, got {len(self.q)} for {count}")
        for q, token_id in zip(self.q, self.token_ids, strict=True):
            if not q.count_of(token_id):
                raise InvalidRequest("q", "a drafted token could not have been drawn from it")

    def __len__(self) -> int:
        return len(self.token_ids)

    # -- its shape

    def parent(self, node: int) -> int:
        return self.parents[node] if self.parents else node - 1

    def children(self) -> list[list[int]]:
        """children()[node + 1]: the nodes that follow `node`."""
        if not self.parents:
            return [*([node] for node in range(len(self.token_ids))), []]
        found: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found

    def depths(self) -> Sequence[int]:
        """For each node the tokens on its path, itself included."""
        if not self.parents:
            return range(1, len(self.token_ids) + 1)
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found

    @property
    def depth(self) -> int:
        """How many positions it covers."""
        return len(self.token_ids) if not self.parents else max(self.depths())

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        found = []
        while node != ROOT:
            found.append(node)
            node = self.parent(node)
        return found[::-1]

    def paths(self) -> list[list[int]]:
        """The path to each leaf."""
        return [self.path(node) for node, following in enumerate(self.children()[1:]) if not following]

    def main(self) -> list[int]:
        """The path of first children."""
        if not self.parents:
            return list(range(len(self)))
        found, last = [], ROOT
        for node, parent in enumerate(self.parents):
            # A parent comes before its children, so one pass finds them all.
            if parent == last:
                found.append(node)
                last = node
        return found

    def guess(self) -> list[int]:
        """The tokens of the main path."""
        return [self.token_ids[node] for node in self.main()] if self.parents else list(self.token_ids)

    def longest(self) -> Sequence[int]:
        """The longest path, the first of several."""
        return max(self.paths(), key=len, default=[]) if self.parents else range(len(self))

    # -- where its tokens come from

    def origin(self, node: int) -> DraftTree:
        """The tree that proposed the token."""
        return self.origins[node] if self.origins else self

    def counted_origins(self) -> list[tuple[DraftTree, int]]:
        """The trees that proposed its tokens, each with how many in a row."""
        if not self.origins:
            return [(self, len(self.token_ids))] if self.token_ids else []
        return [(origin, 1) for origin in self.origins]

    def chance(self, node: int) -> float | None:
        """The source's own probability of the token, given those before it."""
        return self.chances[node] if self.chances else None

    def matched_at(self, node: int, depth: int) -> int:
        """Tokens of the match that this one continues, if those before it are right; 0 without a match."""
        origin = self.origin(node)
        return origin.matched + self.base_len + depth - 1 - origin.base_len if origin.matched else 0

    def seconds_of(self, node: int) -> float:
        """The token's part of the time that its source spent."""
        origin = self.origin(node)
        return origin.seconds / max(1, len(origin))

    @property
    def last_serial(self) -> int:
        """Number of the last message that brought a token of it; 0 without any."""
        return max((origin.serial for origin, _ in self.counted_origins()), default=0)

    # -- other trees made of it

    def after(self, tokens: Sequence[int]) -> DraftTree | None:
        """What is left when these tokens are committed; empty when the tree ends before. None when they are no path of
        it."""
        if not tokens:
            return self
        if not self.parents:
            return self._chain_after(tuple(tokens))
        node, children = ROOT, self.children()
        for token in tokens:
            following = children[node + 1]
            if not following:
                return DraftTree(self.base_len + len(tokens), source=self.source, epoch=self.epoch)
            found = next((child for child in following if self.token_ids[child] == token), None)
            if found is None:
                return None
            node = found
        return self._below(node, len(tokens))

    def _chain_after(self, tokens: tuple[int, ...]) -> DraftTree | None:
        count, length = len(tokens), len(self.token_ids)
        if self.token_ids[:count] != tokens[:length]:
            return None
        if count > length:
            return DraftTree(self.base_len + count, source=self.source, epoch=self.epoch)
        return self.part(count, length)

    def part(self, first: int, last: int) -> DraftTree:
        """Of a chain the tokens from `first` on, before `last`. Written out, and not checked again: a step makes some
        for each sequence."""
        made = object.__new__(DraftTree)
        made.base_len = self.base_len + first
        made.token_ids, made.chances = self.token_ids[first:last], self.chances[first:last]
        made.parents, made.q = (), self.q[first:last]
        made.source, made.matched, made.epoch = self.source, self.matched, self.epoch
        made.serial, made.seconds = self.serial, self.seconds
        made.origins = self.origins[first:last] if self.origins else (self,) * len(made.token_ids)
        made.bins = self.bins and self.bins[first:last]
        return made

    def _below(self, root: int, count: int) -> DraftTree:
        at = {root: ROOT}
        for node in range(root + 1, len(self)):
            if self.parent(node) in at:
                at[node] = len(at) - 1
        del at[root]
        return self._made(list(at), [ROOT if self.parent(n) == root else at[self.parent(n)] for n in at], count)

    def take(self, nodes: Sequence[int]) -> DraftTree:
        """These nodes in this order. Raises ValueError when a node comes before its parent, or without it."""
        if list(nodes) == list(range(len(self))):
            return self
        at = {ROOT: ROOT}
        parents = []
        for number, node in enumerate(nodes):
            if (parent := self.parent(node)) not in at:
                raise ValueError(f"node {node} without its parent {parent}")
            parents.append(at[parent])
            at[node] = number
        return self._made(nodes, parents, 0)

    def upto(self, depth: int) -> DraftTree:
        """Its first `depth` positions."""
        if len(self.token_ids) <= depth:
            return self
        if not self.parents:
            return self.part(0, depth)
        return self.take([node for node, each in enumerate(self.depths()) if each <= depth])

    def _made(self, nodes: Sequence[int], parents: Sequence[int], skipped: int) -> DraftTree:
        return replace(
            self,
            base_len=self.base_len + skipped,
            token_ids=tuple(self.token_ids[node] for node in nodes),
            parents=_unless_chain(parents),
            chances=tuple(self.chances[node] for node in nodes) if self.chances else (),
            q=tuple(self.q[node] for node in nodes) if self.q else (),
            origins=tuple(self.origin(node) for node in nodes),
        )

    def merge(self, other: DraftTree) -> DraftTree:
        """Both, which begin at one position: equal prefixes are one node, which keeps the source that gives it the
        greater chance."""
        merged = _Merged.of(self)
        merged.add(other)
        return merged.tree(self)

    def claims(self) -> list[float]:
        """The chance of each node as its source has it."""
        if self.chances:
            return list(self.chances)
        if not self.matched and not self.origins:
            return [_UNKNOWN] * len(self)
        matches = (self.matched_at(node, depth) for node, depth in enumerate(self.depths()))
        return [chance_after(matched) if matched else _UNKNOWN for matched in matches]


@dataclass(slots=True)
class _Merged:
    """A tree as it grows."""

    token_ids: list[int]
    parents: list[int]
    chances: list[float]
    q: list[DraftDistribution]
    origins: list[DraftTree]
    at: dict[tuple[int, int], int]
    """(parent, token) → node."""

    @classmethod
    def of(cls, tree: DraftTree) -> _Merged:
        parents = [tree.parent(node) for node in range(len(tree))]
        at = {pair: node for node, pair in enumerate(zip(parents, tree.token_ids, strict=True))}
        origins = [tree.origin(node) for node in range(len(tree))]
        return cls(list(tree.token_ids), parents, tree.claims(), list(tree.q), origins, at)

    def add(self, tree: DraftTree) -> None:
        places = {ROOT: ROOT}
        for node, chance in enumerate(tree.claims()):
            pair = places[tree.parent(node)], tree.token_ids[node]
            found = self.at.get(pair)
            if found is None:
                found = self.at[pair] = len(self.token_ids)
                self.token_ids.append(pair[1])
                self.parents.append(pair[0])
                self.chances.append(chance)
                self.origins.append(tree.origin(node))
                self.q += tree.q[node : node + 1]
            elif chance > self.chances[found]:
                self.chances[found], self.origins[found] = chance, tree.origin(node)
            places[node] = found

    def tree(self, first: DraftTree) -> DraftTree:
        return replace(
            first,
            token_ids=tuple(self.token_ids),
            parents=_unless_chain(self.parents),
            chances=tuple(self.chances),
            q=tuple(self.q),
            origins=tuple(self.origins),
        )


def chance_after(matched: int) -> float:
    """How often the next token is right after a match of so many tokens, over texts of all kinds (Spec-Bench)."""
    return matched / (matched + 2)


def _unless_chain(parents: Sequence[int]) -> tuple[int, ...]:
    return () if all(parent == node - 1 for node, parent in enumerate(parents)) else tuple(parents)


def agree(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether one is a prefix of the other."""
    return all(a == b for a, b in zip(first, second, strict=False))


def common_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Of their longest common prefix."""
    for length, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return length
    return min(len(first), len(second))
