"""Which of its drafted tokens a sequence offers to a step, and what each is worth. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.drafting.tree import ROOT, DraftTree
from outrider.engine import MAX_TREE_NODES
from outrider.speculation import VerificationMode
from outrider.target.step.calibration import Calibration, bin_at
from outrider.target.step.sequence import TargetSequence


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
        drafts, most_sent = sequence.drafts, sequence.speculation.max_draft_tokens
        if sequence.mode is not VerificationMode.RATIO:
            tree = drafts.merged(most_sent)
        else:
            tree = max(drafts.within(most_sent), key=lambda each: self.chance(sequence, each), default=None)
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
    _children: list[list[int]] = field(init=False)
    _depths: list[int] = field(init=False)
    _reached: dict[int, tuple[float, float]] = field(init=False)
    """Of each candidate: the chance that all tokens on its path are accepted, itself included, and its value."""

    def __post_init__(self) -> None:
        self._children, self._depths = self.tree.children(), self.tree.depths()
        self._reached = {ROOT: (1.0, self.sequence.speculation.weight)}

    def take(self, node: int) -> list[tuple[float, int]]:
        """Takes the node, or the root at first; returns the new candidates, each with its value.

        Weight times the chance that a token and all before it are accepted: never more than before it.
        """
        if node != ROOT:
            self.nodes.append(node)
            self.depth = max(self.depth, self._depths[node])
        joint, least = self._reached[node]
        weight, fit = self.sequence.speculation.weight, self.sequence.fit
        found, sources = [], set()
        for child in self._children[node + 1]:
            each = bin_at(self.tree, child, self._depths[child])
            # A source's alternatives to its own first choice are tried no more often than it thinks them right.
            explore = each.source not in sources
            sources.add(each.source)
            own = self.calibration.own(each, fit, explore=explore)
            usual = self.calibration.usual(each, fit, explore=explore) if each.drawn else own
            value = min(least, weight * joint * usual)
            self._reached[child] = joint * own, value
            found.append((value, child))
        return found

    def may_take(self, node: int, max_branch_tokens: int) -> bool:
        """Whether the step's engine, and the bound on tokens beyond one path, let it be taken too."""
        count, depth = len(self.nodes) + 1, max(self.depth, self._depths[node])
        return count == depth or (count - depth <= max_branch_tokens and count <= MAX_TREE_NODES)

    @property
    def draft(self) -> DraftTree:
        """The tokens taken."""
        return self.tree.take(self.nodes)
