"""What may come of the step that judges a guess, and how likely each of it is. Pure.

A step ends in one of the guess's positions: all before it accepted, and there the target says something of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.speculation import Proposal

# Less likely ones are not worth a forward's row, nor the bytes.
_LEAST_CHANCE = 0.03
# What another source guessed says more than this model's own doubt of it.
_LEAST_TRUST_IN_OTHERS = 0.6


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
        trust = 0.0 if own else _LEAST_TRUST_IN_OTHERS
        for proposal in likely:
            if proposal.token_id == guessed:
                trust = max(trust, proposal.confidence)
            else:
                chance = reached * proposal.confidence
                found.append(Outcome(position, proposal.token_id, proposal.confidence, chance))
        reached *= trust
    found.sort(key=lambda outcome: -outcome.chance)
    return [outcome for outcome in found[:count] if outcome.chance >= _LEAST_CHANCE]


def merge(paths: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Paths as one tree → token ids, and each one's parent's index or -1. The first path is that of first children."""
    token_ids: list[int] = []
    parents: list[int] = []
    at: dict[tuple[int, int], int] = {}
    for path in paths:
        node = -1
        for token in path:
            child = at.get((node, token))
            if child is None:
                child = at[node, token] = len(token_ids)
                token_ids.append(token)
                parents.append(node)
            node = child
    return token_ids, parents
