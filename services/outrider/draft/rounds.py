"""A draft worker's rounds: one batch of the drafter, or one sequence at a time when that fails. Measures their time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from outrider.draft.events import DraftStats
from outrider.draft.sequences import OpenSequence
from outrider.drafters import Drafter, DraftSequence
from outrider.drafting.tree import DraftTree
from outrider.engine import DeviceLost
from outrider.worker.faults import check_engine
from outrider.worker.step_cost import StepCost

log = logging.getLogger(__name__)

Outcome = DraftTree | Exception | None
"""For one sequence. None: it is still catching up."""


class DraftRounds:
    """Runs the drafter, and divides its time among the sequences of a round."""

    def __init__(self, drafter: Drafter, stats: DraftStats, clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._stats = stats
        self._clock = clock
        self._cost = StepCost()

    @property
    def row_s(self) -> float:
        """Seconds that one more sequence adds to a round."""
        return self._cost.row_s

    def draft(self, due: Sequence[OpenSequence]) -> Sequence[Outcome]:
        """A proposal for each sequence, or the error that it failed with. Raises DeviceLost and WholeStepFailed."""
        started_s = self._clock()
        proposals = self._together([found.sequence for found in due])
        if all(isinstance(one, Exception) for one in proposals):
            check_engine(self._drafter.check)
        spent_s = self._clock() - started_s
        # Not while some sequences catch up with their prompts: only the drafter knows how many tokens of those it ran.
        if not any(one is None or isinstance(one, Exception) for one in proposals):
            self._cost.took(rows=len(due), seconds=spent_s)
        self._stats.busy_s += spent_s
        for found in due:
            found.compute_s += spent_s
            # Each has a row in all forwards of the round.
            found.share_s += spent_s / len(due)
        return proposals

    def _together(self, sequences: Sequence[DraftSequence]) -> Sequence[Outcome]:
        try:
            return self._drafter.draft(sequences)
        except DeviceLost:
            raise
        except Exception as error:
            log.error("a round failed", exc_info=error)
            self._stats.num_round_failures += 1
        # If one sequence broke the round, only that one should end.
        return [self._alone(sequence) for sequence in sequences]

    def _alone(self, sequence: DraftSequence) -> Outcome:
        try:
            return self._drafter.draft([sequence])[0]
        except DeviceLost:
            raise
        except Exception as error:
            log.error("a sequence failed in its round", exc_info=error, extra=sequence.opening.log_fields)
            return error
