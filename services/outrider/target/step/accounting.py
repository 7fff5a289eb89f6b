"""What the worker's steps cost and what comes of them: counts, each sequence's share, and the prices of later plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.target.requests.commit import Outcome
from outrider.target.requests.report import Committed, TargetStats
from outrider.target.requests.times import Timer, Times
from outrider.target.step.calibration import Calibration, bins_of
from outrider.target.step.scheduler import PlannedRow
from outrider.tree import DraftTree
from outrider.worker.step_cost import StepCost


@dataclass(slots=True)
class SteppedRow:
    """What a step ran of one sequence. Made before its commit."""

    timer: Timer
    prompt_tokens: int
    rows: int
    """Tokens that decode or verify."""
    draft: DraftTree
    decides: bool
    """Whether the step commits to it; otherwise it ran a chunk of a prompt."""
    times: Times = field(init=False)
    """Kept here: a commit moves this object to the report, and its shares are known only after the step."""

    def __post_init__(self) -> None:
        self.times = self.timer.times


class StepAccounting:
    """Costs and chances, as measured in the steps so far."""

    def __init__(
        self,
        stats: TargetStats,
        row_price: Callable[[StepCost], float],
        cost: StepCost | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """`cost` and `calibration`: where they are measured elsewhere, as in the scheduler of another engine."""
        self.stats = stats
        self.cost = cost or StepCost()
        self.calibration = calibration or Calibration()
        self._row_price = row_price
        self._num_committed = 0
        """Tokens committed before the step at hand."""

    @property
    def row_price(self) -> float:
        """Price of one more row in a step, as a chance."""
        return self._row_price(self.cost)

    def verified(self, row: PlannedRow, outcome: Outcome, path: Sequence[int], verified: Sequence[int]) -> None:
        """What verification says of a row's drafted tokens: of them all, the nodes that it accepts, and those that it
        looked at."""
        draft, stats, sequence = row.draft, self.stats, row.sequence
        bins = bins_of(draft)
        self.calibration.observe([(bins[node], node in path) for node in verified], sequence.fit)
        sequence.timer.times.num_wasted_rows = len(draft.token_ids) - outcome.num_accepted
        if draft.parents:
            stats.num_branch_tokens += len(draft) - draft.depth
            stats.num_branch_tokens_accepted += len(set(path) - set(draft.main()))

    def committed(self, committed: Committed) -> None:
        outcome, stats = committed.outcome, self.stats
        stats.num_draft_tokens += outcome.num_drafted
        stats.num_verified_tokens += outcome.num_verified
        stats.num_accepted_tokens += outcome.num_accepted
        stats.num_dropped_tokens += committed.num_dropped
        stats.num_committed_tokens += len(outcome.token_ids)
        for counted in committed.sources:
            stats.of_source(counted.source).add(counted)

    def took(self, rows: Sequence[SteppedRow], seconds: float) -> None:
        """Learns what a step costs, after its commits."""
        num_committed, self._num_committed = self._num_committed, self.stats.num_committed_tokens
        tokens = self._num_committed - num_committed
        self.calibration.stepped()
        self.cost.took(seconds=seconds, tokens=tokens, **_sizes(rows))

    def divide(self, rows: Sequence[SteppedRow], seconds: float) -> None:
        """Divides a step's time among its sequences."""
        self.stats.num_steps += 1
        shares = self.cost.shares(sequences=len(rows), seconds=seconds, **_sizes(rows))
        for row in rows:
            share_s, each = shares.of(prompt_tokens=row.prompt_tokens, rows=row.rows), row.times
            wasted_s, each.num_wasted_rows = each.num_wasted_rows * shares.row_s, 0
            each.share_s += share_s
            each.drafted_s += len(row.draft.token_ids) * shares.row_s
            each.wasted_s += wasted_s
            self.stats.busy_s += share_s
            self.stats.wasted_s += wasted_s
            for origin, count in row.draft.counted_origins():
                source = self.stats.of_source(origin.source)
                source.row_s += count * shares.row_s
                source.draft_s += count * origin.seconds / len(origin)


def _sizes(rows: Sequence[SteppedRow]) -> dict[str, int]:
    return {"rows": sum(row.rows for row in rows), "prompt_tokens": sum(row.prompt_tokens for row in rows)}
