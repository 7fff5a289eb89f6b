"""What may come of the step that judges a guess, and how likely each of it is. Pure.

A step ends in one of the guess's positions: all before it accepted, and there the target says something of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafters.sequence import Drafted
from outrider.speculation import Proposal

# Less likely ones are not worth a forward's row, nor the bytes.
_MIN_CHANCE = 0.03
# What another source guessed says more than this model's own doubt of it.
_MIN_TRUST_IN_OTHERS = 0.6


@dataclass(frozen=True, slots=True)
class Outcome:
    """`num_accepted` tokens of the guess, then `token_id`."""

    num_accepted: int
    token_id: int
    confidence: float
    """The model's probability of the token there."""
    chance: float
    """That it comes to this."""


def likely_outcomes(
    guess: Sequence[int], ranked: Sequence[Sequence[Proposal]], count: int, *, own: bool
) -> list[Outcome]:
    """At most `count` outcomes that a further guess could follow, likeliest first.

    `ranked` [positions judged + 1] gives what the model thinks likely at each; `own` tells whether the guess is its.
    """
    found = []
    reached = 1.0
    for position, likely in enumerate(ranked):
        guessed = guess[position] if position < len(guess) else None
        trust = 0.0 if own else _MIN_TRUST_IN_OTHERS
        for proposal in likely:
            if proposal.token_id == guessed:
                trust = max(trust, proposal.confidence)
            else:
                chance = reached * proposal.confidence
                found.append(Outcome(position, proposal.token_id, proposal.confidence, chance))
        reached *= trust
    found.sort(key=lambda outcome: -outcome.chance)
    return [outcome for outcome in found[:count] if outcome.chance >= _MIN_CHANCE]


@dataclass(slots=True)
class Tree:
    """Tokens, each one's parent's index or -1, and the draft's own probability of each."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    _at: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, node: int, token_id: int, confidence: float) -> int:
        """The token after `node`, which is another node's index or -1."""
        child = self._at.get((node, token_id))
        if child is None:
            child = self._at[node, token_id] = len(self.token_ids)
            self.token_ids.append(token_id)
            self.parents.append(node)
            self.confidence.append(confidence)
        return child


def merge(paths: Sequence[Drafted]) -> Tree:
    """Paths, with what stands beside them, as one tree. The first path is that of first children."""
    tree, ways = Tree(), []
    for path in paths:
        way = [-1]
        # What has no probability of its own is quoted, and seldom wrong.
        for token_id, confidence in zip(path.token_ids, path.confidence or [1.0] * len(path.token_ids), strict=True):
            way.append(tree.add(way[-1], token_id, confidence))
        ways.append(way)
    for path, way in zip(paths, ways, strict=True):
        for one in path.siblings:
            tree.add(way[one.at], one.token_id, one.confidence)
    return tree
