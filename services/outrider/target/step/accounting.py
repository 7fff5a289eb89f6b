"""What the worker's steps cost and what comes of them: counts, each sequence's share, and the prices of later plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.target.drafts.calibration import bins_of
from outrider.target.requests.report import TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.step.port import Capabilities
from outrider.worker.step_cost import StepShares


class StepAccounting:
    """Costs and chances, as measured in the steps so far."""

    def __init__(self, stats: TargetStats, engine: Capabilities) -> None:
        self.stats = stats
        self._engine = engine

    def committed(self, row: StepRow[Any], verified: Sequence[int]) -> None:
        """What verification says of a row's drafted tokens. `verified`: of these nodes, as the row has them."""
        draft, stats = row.draft, self.stats
        if not self._engine.plans_ahead:
            bins, fit = bins_of(draft), row.sequence.drafts.fit
            self._engine.calibration.verified([bins[node] for node in verified], len(row.accepted), fit)
        if draft.parents:
            stats.num_branch_tokens += row.num_branch_tokens
            stats.num_branch_tokens_accepted += len(set(row.accepted) - set(draft.main()))
        stats.num_draft_tokens += row.num_drafted
        stats.num_verified_tokens += row.num_verified
        stats.num_accepted_tokens += row.num_accepted
        stats.num_dropped_tokens += row.num_dropped
        stats.num_committed_tokens += len(row.token_ids)
        for counted in row.sources:
            stats.of_source(counted.source).add(counted)

    def stepped(self, rows: Sequence[StepRow[Any]], seconds: float, drafting_s: float) -> None:
        """After a step's commits: divides its time among its sequences, and learns what it cost, without the time in
        which its drafts were made. Longer ones take longer: a row would seem to cost what its token did.
        """
        prompt_tokens = sum(row.num_prefilled for row in rows)
        sizes = {"rows": sum(row.num_run for row in rows) - prompt_tokens, "prompt_tokens": prompt_tokens}
        cost = self._engine.cost
        self._divide(rows, cost.shares(sequences=len(rows), seconds=seconds, **sizes))
        if not self._engine.plans_ahead:
            self._engine.calibration.stepped()
            cost.took(seconds=seconds - drafting_s, tokens=sum(len(row.token_ids) for row in rows), **sizes)

    def _divide(self, rows: Sequence[StepRow[Any]], shares: StepShares) -> None:
        self.stats.num_steps += 1
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
