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
        for found in due:
            found.compute_s += spent_s
        self._divide(due, spent_s)
        return proposals

    def run_ahead(self, ahead: Sequence[OpenSequence]) -> Sequence[DraftTree]:
        """The tokens that each draft has grown by; none if the round failed."""
        started_s = self._clock()
        try:
            added = self._drafter.run_ahead([found.sequence for found in ahead])
        except DeviceLost:
            raise
        except Exception as error:
            # Nothing waits for these. If one sequence is at fault, the round after its next commit shows it.
            log.error("running ahead failed", exc_info=error)
            self._stats.num_round_failures += 1
            return [DraftTree(found.sequence.committed_len) for found in ahead]
        self._divide(ahead, self._clock() - started_s)
        return added

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

    def _divide(self, sequences: Sequence[OpenSequence], seconds: float) -> None:
        """Divides a round's time among its sequences, each of which has a row in all of its forwards."""
        self._stats.busy_s += seconds
        for found in sequences:
            found.share_s += seconds / len(sequences)
