"""What a draft model prepares while its guess is judged: a continuation for each likely outcome.

A third of all steps end in a token that the draft did not guess but thought likely. Where the target already holds what
follows it, its next step begins at once, without a round trip. One forward ranks what may come; each one after it grows
all continuations by a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafters.outcomes import Outcome
from outrider.drafters.rounds import Chain
from outrider.drafters.sequence import Drafted, DraftSequence
from outrider.engine import EngineSequence, Row

# A forward each. Proposals are two and a half tokens long on average, and what comes later may come as drafts do.
_MOST_AFTER = 3


@dataclass(slots=True)
class Branch:
    """One outcome, and what is guessed after it."""

    outcome: Outcome
    kv: EngineSequence
    """Everything before the outcome's own token at first."""
    chain: Chain

    def row(self) -> Row:
        """Its last token: the outcome's at first, then that of the chain."""
        tokens = self.chain.drafted.token_ids
        return Row(self.kv, tokens[-1:] or [self.outcome.token_id], 1)


@dataclass(slots=True)
class Branches:
    """All that is being prepared for one sequence."""

    guess: Drafted
    growing: list[Branch]

    @property
    def unfinished(self) -> list[Branch]:
        return [branch for branch in self.growing if not branch.chain.ended]

    def paths(self) -> tuple[Drafted, ...]:
        """The guess first, as long as its own branch has made it; then the paths that leave it."""
        guess, others = self.guess, []
        for branch in self.growing:
            drafted, count = branch.chain.drafted, branch.outcome.num_accepted
            if not drafted.token_ids:
                continue
            path = Drafted(
                drafted.source,
                [*self.guess.token_ids[:count], branch.outcome.token_id, *drafted.token_ids],
                [*_confidence(self.guess, count), branch.outcome.confidence, *drafted.confidence],
            )
            if count == len(self.guess.token_ids) and guess is self.guess:
                # The likeliest outcome of all being accepted is what the guess itself goes on with.
                guess = path
            else:
                others.append(path)
        return (guess, *others)


def _confidence(guess: Drafted, count: int) -> list[float]:
    return guess.confidence[:count] if guess.confidence else [1.0] * count


def wanted_after(sequence: DraftSequence, outcome: Outcome) -> int:
    """Tokens worth guessing after an outcome."""
    return max(0, min(_MOST_AFTER, sequence.max_draft_tokens, sequence.reach - outcome.num_accepted - 1))
