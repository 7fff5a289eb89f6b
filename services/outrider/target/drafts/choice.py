"""Which drafted tokens a step verifies: what sequences offer, what each token is worth, what there is room for. Pure.

The most valuable of all sequences come first, as far as each is worth its row.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from outrider.engine import MAX_TREE_NODES
from outrider.target.drafts.calibration import Calibration, bin_at, bins_of
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.tree import ROOT, DraftTree


def _none_free(num_rows: int, num_tokens: int) -> int:
    return 0


@dataclass(slots=True)
class StepRoom:
    """The tokens left in a step, and the blocks left in the KV cache: drafts never preempt."""

    tokens: int
    blocks: int
    block_size: int

    def fit(self, start: int, wanted: int, keep_tokens: int = 0) -> int:
        """How many of `wanted` tokens fit from position `start` on."""
        slots = self.blocks * self.block_size + -start % self.block_size
        return max(0, min(wanted, self.tokens - keep_tokens, slots))

    def holds(self, counts: Sequence[int], keep_tokens: int = 0) -> bool:
        """Whether so many tokens of each of some rows fit in any case, wherever they start."""
        num_tokens = sum(counts)
        return num_tokens <= self.tokens - keep_tokens and num_tokens // self.block_size + len(counts) <= self.blocks

    def take(self, start: int, count: int) -> None:
        self.tokens -= count
        self.blocks -= blocks_for(count - -start % self.block_size, self.block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class Pricing:
    """What drafted tokens cost, and how likely they are accepted. By default all are verified."""

    price: float = 0.0
    """Price of a row: the least chance, times the sequence's weight, at which a token is verified."""
    calibration: Calibration = field(default_factory=Calibration)
    num_free: Callable[[int, int], int] = _none_free
    """(sequences, tokens) of a step → how many more tokens it would run in the same time, as a recorded step does."""

    def may_pay(self, drafts: SequenceDrafts) -> bool:
        """Whether a draft that could still come would be verified, and is worth more than what was looked up."""
        best = self.calibration.best(drafts.fit)
        return drafts.speculation.weight * best >= self.price and best > self.first_chance(drafts)

    def first_chance(self, drafts: SequenceDrafts) -> float:
        """The chance of the likeliest next token that is offered already; 0 without any."""
        return max((self.chance(drafts, tree) for tree in drafts.buffer.trees), default=0.0)

    def chance(self, drafts: SequenceDrafts, tree: DraftTree) -> float:
        """The chance of a tree's likeliest first token, whatever was drawn there."""
        first = (node for node in range(len(tree)) if tree.parent(node) == ROOT)
        return max(self.calibration.usual(bin_at(tree, node, 1), drafts.fit) for node in first)

    def offered(self, drafts: SequenceDrafts, depth: int) -> DraftTree | None:
        """What may be verified of a sequence's drafts in the next step, at most so many positions.

        In ratio mode the chain of one source. It is chosen by what the source usually does, never by the token that it
        drew: a drawn token that only some draws let through to its verification would not be emitted as under p.
        """
        if not drafts.ratio:
            tree = drafts.buffer.merged()
        else:
            tree = max(drafts.buffer.trees, key=lambda each: self.chance(drafts, each), default=None)
        return None if tree is None else tree.upto(depth)


@dataclass(slots=True)
class DraftChoice:
    """The tokens of one sequence that a step takes. A token is a candidate once its parent is taken."""

    tree: DraftTree
    drafts: SequenceDrafts
    calibration: Calibration
    num_ahead: int = 0
    """Of a chain so many come first that a running step may commit: they are no part of this one."""
    nodes: list[int] = field(init=False)
    """Those taken, in order, after those ahead."""
    depth: int = field(init=False)
    """Of the longest path taken, with those ahead."""
    values: list[float] = field(init=False)
    """At node + 1: weight times the chance that the token and all before it are accepted; never more than before it."""
    _depths: Sequence[int] = field(init=False)
    _children: list[list[int]] | None = None

    def __post_init__(self) -> None:
        weight, self._depths = self.drafts.speculation.weight, self.tree.depths()
        self.nodes, self.depth = [*range(self.num_ahead)], self.num_ahead
        if self.tree.parents or self.tree.q:
            self.values = self._tree_values(weight)
        else:
            self.values = [*accumulate(self.calibration.owns(self.tree, self.drafts.fit), mul, initial=weight)]

    def _tree_values(self, weight: float) -> list[float]:
        tree, fit, values, joint = self.tree, self.drafts.fit, [weight], [1.0]
        known = set[tuple[int, str]]()
        for node, each in enumerate(bins_of(tree)):
            parent = tree.parent(node)
            # A source's alternatives to its own first choice are tried no more often than it thinks them right.
            explore = (parent, each.source) not in known
            known.add((parent, each.source))
            own, usual = (find(each, fit, explore=explore) for find in (self.calibration.own, self.calibration.usual))
            values.append(min(values[parent + 1], weight * joint[parent + 1] * usual))
            joint.append(joint[parent + 1] * own)
        return values

    def take_paying(self, price: float) -> int:
        """Takes the tokens of a chain that are worth their rows, where there is room for all. Returns how many."""
        if self.tree.parents:
            return 0
        # They never rise. Written so that NaN is worth nothing.
        all_pay = self.values[-1] >= price
        paying = len(self.values) - 1 if all_pay else sum(value >= price for value in self.values[1:])
        before, self.depth = self.depth, max(self.depth, paying)
        self.nodes += range(before, self.depth)
        return self.depth - before

    def take(self, node: int) -> None:
        self.nodes.append(node)
        self.depth = max(self.depth, self._depths[node])

    def candidates(self) -> list[tuple[float, int]]:
        """The tokens that follow the last one that was taken, or the root at first, each with its value."""
        if self._children is None:
            self._children = self.tree.children()
        return [(self.values[child + 1], child) for child in self._children[self.nodes[-1] + 1 if self.nodes else 0]]

    def may_take(self, node: int, max_branch_tokens: int) -> bool:
        """Whether the step's engine, and the bound on tokens beyond one path, let it be taken too."""
        count, depth = len(self.nodes) + 1, max(self.depth, self._depths[node])
        return count == depth or (count - depth <= max_branch_tokens and count <= MAX_TREE_NODES)

    @property
    def num_left(self) -> int:
        """Tokens that are not taken."""
        return len(self.tree.token_ids) - len(self.nodes)

    @property
    def end(self) -> int:
        """The position after as many tokens as are taken."""
        return self.tree.base_len + len(self.nodes)

    @property
    def draft(self) -> DraftTree:
        """The tokens taken."""
        return self.tree if not (self.num_left or self.tree.parents) else self.tree.take(self.nodes)


def take_drafts(
    choices: Sequence[DraftChoice],
    room: StepRoom,
    pricing: Pricing,
    *,
    keep_tokens: int = 0,
    max_branch_tokens: int = 0,
    num_rows: int = 0,
    num_tokens: int = 0,
) -> None:
    """Takes tokens of all choices, the most valuable first, as long as one is worth its row or the row is free.

    A token is a candidate once its parent is taken, and its value is never higher than its parent's. `num_rows` and
    `num_tokens`: of the step without drafts.
    """
    if room.holds([choice.num_left for choice in choices], keep_tokens):
        # Nobody takes another's room, so the order of those that pay does not matter.
        for choice in choices:
            start, count = choice.end, choice.take_paying(pricing.price)
            room.take(start, count)
            num_tokens += count
    order = itertools.count()
    waiting = [
        (-value, next(order), number, node)
        for number, choice in enumerate(choices)
        if choice.num_left
        for value, node in choice.candidates()
    ]
    heapq.heapify(waiting)
    while waiting:
        least, _, number, node = heapq.heappop(waiting)
        if not (-least >= pricing.price or pricing.num_free(num_rows, num_tokens)):
            break
        choice = choices[number]
        if not (choice.may_take(node, max_branch_tokens) and room.fit(choice.end, 1, keep_tokens)):
            continue
        room.take(choice.end, 1)
        num_tokens += 1
        choice.take(node)
        for value, child in choice.candidates():
            heapq.heappush(waiting, (-value, next(order), number, child))
