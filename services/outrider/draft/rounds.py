"""A draft worker's rounds: one batch of the drafter, or one sequence at a time where that fails. Counts their time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from outrider.draft.report import DraftStats
from outrider.draft.sequences import OpenSequence
from outrider.drafters import Drafted, Drafter, DraftSequence
from outrider.worker.step_cost import StepCost

log = logging.getLogger(__name__)

Outcome = Drafted | Exception | None
"""Of one sequence. None: it is still catching up."""


class DraftRounds:
    """Runs the drafter, and divides what that takes among the sequences of a round."""

    def __init__(self, drafter: Drafter, stats: DraftStats, clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._stats = stats
        self._clock = clock
        self._cost = StepCost()

    @property
    def row_s(self) -> float:
        """What a sequence more adds to a round."""
        return self._cost.row_s

    def draft(self, due: Sequence[OpenSequence]) -> Sequence[Outcome]:
        """A proposal for each. What fails in a sequence is its outcome."""
        started_s = self._clock()
        outcomes = self._together([found.sequence for found in due])
        spent_s = self._clock() - started_s
        # Not while some of them catch up with their prompts: how much of those was run is the drafter's.
        if not any(outcome is None or isinstance(outcome, Exception) for outcome in outcomes):
            self._cost.took(rows=len(due), seconds=spent_s)
        for found in due:
            found.compute_s += spent_s
        self._divide(due, spent_s)
        return outcomes

    def run_ahead(self, ahead: Sequence[OpenSequence]) -> Sequence[Drafted]:
        """What each guess has grown by; nothing where the round failed."""
        started_s = self._clock()
        try:
            added = self._drafter.run_ahead([found.sequence for found in ahead])
        except Exception as error:
            # Nobody waits for these. The next commit tells whose fault it was, if it was a sequence's.
            log.error("running ahead failed", exc_info=error)
            self._stats.num_round_failures += 1
            return [Drafted() for _ in ahead]
        self._divide(ahead, self._clock() - started_s)
        return added

    def _together(self, sequences: Sequence[DraftSequence]) -> Sequence[Outcome]:
        try:
            return self._drafter.draft(sequences)
        except Exception as error:
            log.error("a round failed", exc_info=error)
            self._stats.num_round_failures += 1
        # One of them may be what broke the round, and only that one should end.
        return [self._alone(sequence) for sequence in sequences]

    def _alone(self, sequence: DraftSequence) -> Outcome:
        try:
            return self._drafter.draft([sequence])[0]
        except Exception as error:
            log.error("a sequence failed in its round", exc_info=error, extra=sequence.opening.log_fields)
            return error

    def _divide(self, sequences: Sequence[OpenSequence], seconds: float) -> None:
        """A round's time among its sequences: each has a row in all of its forwards."""
        self._stats.busy_s += seconds
        for found in sequences:
            found.share_s += seconds / len(sequences)
