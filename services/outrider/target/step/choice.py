"""Which of its drafted tokens a sequence offers to a step, and what each is worth. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from outrider.engine import MAX_TREE_NODES
from outrider.speculation import VerificationMode
from outrider.target.step.calibration import Calibration, bin_at, bins_of
from outrider.target.step.sequence import TargetSequence
from outrider.tree import ROOT, DraftTree


def _none_free(num_rows: int, num_tokens: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Pricing:
    """What drafted tokens cost, and how likely they are accepted. By default all are verified."""

    price: float = 0.0
    """Price of a row: the least chance, times the sequence's weight, at which a token is verified."""
    calibration: Calibration = field(default_factory=Calibration)
    num_free: Callable[[int, int], int] = _none_free
    """(sequences, tokens) of a step → how many more tokens it would run in the same time, as a recorded step does."""

    def may_pay(self, sequence: TargetSequence) -> bool:
        """Whether a draft that could still come would be verified, and is worth more than what was looked up."""
        best = self.calibration.best(sequence.fit)
        return sequence.speculation.weight * best >= self.price and best > self.first_chance(sequence)

    def first_chance(self, sequence: TargetSequence) -> float:
        """The chance of the likeliest next token that is offered already; 0 without any."""
        return max((self.chance(sequence, tree) for tree in sequence.drafts.trees), default=0.0)

    def chance(self, sequence: TargetSequence, tree: DraftTree) -> float:
        """The chance of a tree's likeliest first token, whatever was drawn there."""
        first = (node for node in range(len(tree)) if tree.parent(node) == ROOT)
        return max(self.calibration.usual(bin_at(tree, node, 1), sequence.fit) for node in first)

    def offered(self, sequence: TargetSequence) -> DraftTree | None:
        """What may be verified of a sequence's drafts in the next step.

        In ratio mode the chain of one source. It is chosen by what the source usually does, never by the token that it
        drew: a drawn token that only some draws let through to its verification would not be emitted as under p.
        """
        drafts = sequence.drafts
        if sequence.mode is not VerificationMode.RATIO:
            tree = drafts.merged()
        else:
            tree = max(drafts.trees, key=lambda each: self.chance(sequence, each), default=None)
        return None if tree is None else tree.upto(sequence.max_depth)


@dataclass(slots=True)
class DraftChoice:
    """The tokens of one sequence that a step takes. A token is a candidate once its parent is taken."""

    tree: DraftTree
    sequence: TargetSequence
    calibration: Calibration
    nodes: list[int] = field(default_factory=list)
    """Those taken, in order."""
    depth: int = 0
    """Of the longest path taken."""
    values: list[float] = field(init=False)
    """At node + 1: weight times the chance that the token and all before it are accepted; never more than before it."""
    _depths: Sequence[int] = field(init=False)
    _children: list[list[int]] | None = None

    def __post_init__(self) -> None:
        weight, self._depths = self.sequence.speculation.weight, self.tree.depths()
        if self.tree.parents or self.tree.q:
            self.values = self._tree_values(weight)
        else:
            self.values = [*accumulate(self.calibration.owns(self.tree, self.sequence.fit), mul, initial=weight)]

    def _tree_values(self, weight: float) -> list[float]:
        tree, fit, values, joint = self.tree, self.sequence.fit, [weight], [1.0]
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
        all_pay = self.values[-1] >= price
        self.depth = len(self.values) - 1 if all_pay else sum(value >= price for value in self.values[1:])
        self.nodes += range(self.depth)
        return self.depth

    def take(self, node: int) -> None:
        self.nodes.append(node)
        self.depth = max(self.depth, self._depths[node])

    def candidates(self) -> list[tuple[float, int]]:
        """The tokens that follow the last one that was taken, or the root at first, each with its value."""
        if self._whole:
            return []
        if self._children is None:
            self._children = self.tree.children()
        return [(self.values[child + 1], child) for child in self._children[self.nodes[-1] + 1 if self.nodes else 0]]

    def may_take(self, node: int, max_branch_tokens: int) -> bool:
        """Whether the step's engine, and the bound on tokens beyond one path, let it be taken too."""
        count, depth = len(self.nodes) + 1, max(self.depth, self._depths[node])
        return count == depth or (count - depth <= max_branch_tokens and count <= MAX_TREE_NODES)

    @property
    def draft(self) -> DraftTree:
        """The tokens taken."""
        return self.tree if self._whole and not self.tree.parents else self.tree.take(self.nodes)

    @property
    def _whole(self) -> bool:
        return len(self.nodes) == len(self.tree.token_ids)
