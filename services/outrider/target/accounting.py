"""What the worker's steps cost and what comes of them: counts, each sequence's share, and the prices of later plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.target.calibration import Calibration, bin_at
from outrider.target.commit import Outcome
from outrider.target.report import Committed, TargetStats
from outrider.target.scheduler import PlannedRow
from outrider.target.times import Times
from outrider.worker.step_cost import StepCost, StepShares


class StepAccounting:
    """Costs and chances, as measured in the steps so far."""

    def __init__(self, stats: TargetStats, row_price: Callable[[StepCost], float]) -> None:
        self.cost = StepCost()
        self.calibration = Calibration()
        self._stats = stats
        self._row_price = row_price
        self._num_committed = 0
        """Tokens committed in the step at hand."""

    @property
    def row_price(self) -> float:
        """Price of one more row in a step, as a chance."""
        return self._row_price(self.cost)

    def verified(
        self, row: PlannedRow, outcome: Outcome, path: Sequence[int], verified: Sequence[tuple[int, int]]
    ) -> None:
        """What verification says of a row's drafted tokens: of them all, and the nodes that it accepts, and of those
        that it looked at, each with its depth."""
        draft, stats, sequence = row.draft, self._stats, row.sequence
        verdicts = [(bin_at(draft, node, depth), node in path) for node, depth in verified]
        self.calibration.observe(verdicts, sequence.fit)
        sequence.timer.times.num_wasted_rows = len(draft) - outcome.num_accepted
        stats.num_branch_tokens += len(draft) - draft.depth
        stats.num_branch_tokens_accepted += len(set(path) - set(draft.main()))

    def committed(self, committed: Committed) -> None:
        outcome, stats = committed.outcome, self._stats
        stats.num_draft_tokens += outcome.num_drafted
        stats.num_verified_tokens += outcome.num_verified
        stats.num_accepted_tokens += outcome.num_accepted
        stats.num_dropped_tokens += committed.num_dropped
        stats.num_committed_tokens += len(outcome.token_ids)
        for counted in committed.sources:
            stats.of_source(counted.source).add(counted)
        self._num_committed += len(outcome.token_ids)

    def stepped(self, rows: Sequence[PlannedRow], times: Sequence[Times], seconds: float) -> None:
        """One step of these rows; `times` are those that their sequences had when it began."""
        self._stats.num_steps += 1
        self.calibration.stepped()
        prompt_tokens = sum(row.num_tokens for row in rows if not row.decodes)
        took = {"rows": sum(row.num_run for row in rows) - prompt_tokens, "prompt_tokens": prompt_tokens}
        self._divide(rows, times, self.cost.shares(sequences=len(rows), seconds=seconds, **took))
        self.cost.took(seconds=seconds, tokens=self._num_committed, **took)
        self._num_committed = 0

    def _divide(self, rows: Sequence[PlannedRow], times: Sequence[Times], shares: StepShares) -> None:
        """Divides a step's time among its sequences."""
        for row, each in zip(rows, times, strict=True):
            prompt_tokens = 0 if row.decodes else row.num_tokens
            share_s = shares.of(prompt_tokens=prompt_tokens, rows=row.num_run - prompt_tokens)
            wasted_s, each.num_wasted_rows = each.num_wasted_rows * shares.row_s, 0
            each.share_s += share_s
            each.wasted_s += wasted_s
            self._stats.busy_s += share_s
            self._stats.wasted_s += wasted_s
            for origin in row.draft.origins or (row.draft,) * len(row.draft):
                source = self._stats.of_source(origin.source)
                source.row_s += shares.row_s
                source.draft_s += origin.seconds / len(origin)
