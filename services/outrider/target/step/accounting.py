"""What the worker's steps cost and what comes of them: counts, each sequence's share, and the prices of later plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.target.drafts.calibration import Fit, bins_of
from outrider.target.requests.report import TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.step.port import Capabilities


class StepAccounting:
    """Costs and chances, as measured in the steps so far."""

    def __init__(self, stats: TargetStats, measured: Capabilities) -> None:
        """`measured`: of the engine, with what its steps cost and what comes of drafts there."""
        self.stats = stats
        self.cost = measured.cost
        self.calibration = measured.calibration
        self._num_committed = 0
        """Tokens committed before the step at hand."""

    def verified(self, row: StepRow[Any], fit: Fit, verified: Sequence[int]) -> None:
        """What verification says of a row's drafted tokens. `verified`: the nodes that it looked at."""
        draft, stats, bins = row.draft, self.stats, bins_of(row.draft)
        nodes = [*row.accepted, *(node for node in verified if node not in row.accepted)] if draft.parents else verified
        self.calibration.verified([bins[node] for node in nodes], len(row.accepted), fit)
        if draft.parents:
            stats.num_branch_tokens += len(draft) - draft.depth
            stats.num_branch_tokens_accepted += len(set(row.accepted) - set(draft.main()))

    def committed(self, row: StepRow[Any]) -> None:
        stats = self.stats
        stats.num_draft_tokens += row.num_drafted
        stats.num_verified_tokens += row.num_verified
        stats.num_accepted_tokens += row.num_accepted
        stats.num_dropped_tokens += row.num_dropped
        stats.num_committed_tokens += len(row.token_ids)
        for counted in row.sources:
            stats.of_source(counted.source).add(counted)

    def took(self, rows: Sequence[StepRow[Any]], seconds: float) -> None:
        """Learns what a step costs, after its commits."""
        num_committed, self._num_committed = self._num_committed, self.stats.num_committed_tokens
        tokens = self._num_committed - num_committed
        self.calibration.stepped()
        self.cost.took(seconds=seconds, tokens=tokens, **_sizes(rows))

    def divide(self, rows: Sequence[StepRow[Any]], seconds: float) -> None:
        """Divides a step's time among its sequences."""
        self.stats.num_steps += 1
        shares = self.cost.shares(sequences=len(rows), seconds=seconds, **_sizes(rows))
        for row in rows:
            prompt_tokens, each = row.num_prefilled, row.times
            share_s = shares.of(prompt_tokens=prompt_tokens, rows=row.num_run - prompt_tokens)
            wasted_s = row.num_wasted * shares.row_s
            each.share_s += share_s
            each.drafted_s += len(row.draft.token_ids) * shares.row_s
            each.wasted_s += wasted_s
            self.stats.busy_s += share_s
            self.stats.wasted_s += wasted_s
            for origin, count in row.draft.counted_origins():
                source = self.stats.of_source(origin.source)
                source.row_s += count * shares.row_s
                source.draft_s += count * origin.seconds / len(origin)


def _sizes(rows: Sequence[StepRow[Any]]) -> dict[str, int]:
    prompt_tokens = sum(row.num_prefilled for row in rows)
    return {"rows": sum(row.num_run for row in rows) - prompt_tokens, "prompt_tokens": prompt_tokens}
