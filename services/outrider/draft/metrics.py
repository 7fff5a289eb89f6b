"""Prometheus metrics of a draft worker: fed by its reports, and by its counters when scraped."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from outrider.draft.report import DraftStats, Report
from outrider.rpc.v1 import worker_pb2
from outrider.telemetry.metrics import WorkerMetrics
from outrider.worker.metrics import CounterCollector, CounterRow
from outrider.worker.report import Load


class DraftMetrics:
    """One worker's part of a registry."""

    def __init__(self, registry: CollectorRegistry, info: worker_pb2.WorkerInfo, stats: DraftStats) -> None:
        shape = {"block_size": info.block_size, "num_blocks": info.num_blocks}
        self._worker = WorkerMetrics(registry, info.model, **shape, prefix="outrider_draft_")
        registry.register(CounterCollector(info.model, lambda: _counters(stats)))

    def observe(self, report: Report, load: Load) -> None:
        """One turn of the loop."""
        self._worker.load(
            num_running=load.num_running, num_waiting=load.num_waiting, num_free_blocks=load.num_free_blocks
        )
        if report.proposals:
            self._worker.step(report.round_s)


def _counters(stats: DraftStats) -> tuple[CounterRow, ...]:
    """Proposals by source, and the events that should be rare."""
    return (
        ("draft_busy_seconds", "Time in rounds, those ahead included.", stats.busy_s),
        ("draft_proposals", "Proposals sent, those without tokens included.", stats.num_proposals),
        ("draft_declined", "Proposals without tokens.", stats.num_declined),
        ("draft_divergences", "Guesses that a commit contradicted.", stats.num_diverged),
        ("draft_sequence_errors", "Sequences that ended by a fault.", stats.num_failed),
        ("draft_step_failures", "Rounds that failed and were repeated one by one.", stats.num_round_failures),
        ("draft_unknown_sequence_messages", "Messages about sequences that are not open.", stats.num_unknown),
        ("draft_proposed_tokens", "Tokens proposed to targets.", stats.num_draft_tokens),
    )
