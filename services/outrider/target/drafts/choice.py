"""Which drafted tokens a step verifies: what sequences offer, what each token is worth, what there is room for. Pure.

The most valuable of all sequences come first, as far as each is worth its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

    def offered(self, drafts: SequenceDrafts, depth: int) -> DraftTree:
        """What may be verified of a sequence's drafts in the next step, at most so many positions.

        In ratio mode the chain of one source. It is chosen by what the source usually does, never by the token that it
        drew: a drawn token that only some draws let through to its verification would not be emitted as under p.
        """
        if not drafts.ratio:
            tree = drafts.buffer.merged()
        else:
            tree = max(drafts.buffer.trees, key=lambda each: self.chance(drafts, each), default=None)
        return DraftTree(len(drafts.tokens)) if tree is None else tree.upto(depth)

    def values(self, drafts: SequenceDrafts, tree: DraftTree) -> list[float]:
        """Of each node: weight times the chance that the token and all before it are accepted; never more than that of
        its parent."""
        weight, fit, calibration = drafts.speculation.weight, drafts.fit, self.calibration
        if not (tree.parents or tree.q):
            return [*accumulate(calibration.owns(tree, fit), mul, initial=weight)][1:]
        values, joint, known = [weight], [1.0], set[tuple[int, str]]()
        for node, each in enumerate(bins_of(tree)):
            parent = tree.parent(node)
            # A source's alternatives to its own first choice are tried no more often than it thinks them right.
            explore = (parent, each.source) not in known
            known.add((parent, each.source))
            own, usual = (find(each, fit, explore=explore) for find in (calibration.own, calibration.usual))
            values.append(min(values[parent + 1], weight * joint[parent + 1] * usual))
            joint.append(joint[parent + 1] * own)
        return values[1:]


def take_drafts(
    trees: Sequence[DraftTree],
    values: Sequence[Sequence[float]],
    room: StepRoom,
    pricing: Pricing,
    *,
    keep_tokens: int = 0,
    max_branch_tokens: int = 0,
    num_rows: int = 0,
    num_tokens: int = 0,
) -> list[DraftTree]:
    """The part of each tree that a step verifies: the most valuable tokens of all, as long as one is worth its row or
    the row is free. `values`: of each node, as Pricing has them; `num_rows` and `num_tokens`: of the step without
    drafts.
    """
    price, depths = pricing.price, [tree.depths() for tree in trees]
    taken, reached = [list[int]() for _ in trees], [0] * len(trees)

    def take(numbers: Iterable[int], *, paying: bool) -> None:
        """Takes those of these trees that are worth their rows, or those that are not, as long as a row is free."""
        nonlocal num_tokens
        nodes = [
            (-value, number, node)
            for number in numbers
            for node, value in enumerate(values[number])
            if (value >= price) is paying
        ]
        # A parent is worth as much as its child at least, and comes before it.
        for _, number, node in sorted(nodes):
            if not (paying or pricing.num_free(num_rows, num_tokens)):
                return
            tree, before = trees[number], taken[number]
            if (parent := tree.parent(node)) != ROOT and parent not in before:
                continue
            count, depth = len(before) + 1, max(reached[number], depths[number][node])
            num_beside = count - depth
            if num_beside and (num_beside > max_branch_tokens or count > MAX_TREE_NODES):
                continue
            if room.fit(start := tree.base_len + len(before), 1, keep_tokens):
                room.take(start, 1)
                num_tokens += 1
                before.append(node)
                reached[number] = depth

    if room.holds([len(tree.token_ids) for tree in trees], keep_tokens):
        # Nobody takes another's room, so the order of those that pay does not matter.
        for number, (tree, own) in enumerate(zip(trees, values, strict=True)):
            if tree.parents:
                take([number], paying=True)
            else:
                # They never rise. Written so that NaN is worth nothing.
                count = len(own) if own[-1] >= price else sum(value >= price for value in own)
                taken[number], reached[number] = [*range(count)], count
                room.take(tree.base_len, count)
                num_tokens += count
    else:
        take(range(len(trees)), paying=True)
    if pricing.num_free(num_rows, num_tokens):
        take(range(len(trees)), paying=False)
    pairs = zip(trees, taken, strict=True)
    return [tree.take(nodes) if tree.parents else tree.upto(len(nodes)) for tree, nodes in pairs]
