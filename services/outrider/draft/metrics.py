"""Prometheus metrics of a draft worker: fed by its reports, and by its tally when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.draft.report import Report, Tally
from outrider.rpc.v1 import worker_pb2
from outrider.telemetry.metrics import WorkerMetrics
from outrider.worker.report import Load


class DraftMetrics:
    """One worker's part of a registry."""

    def __init__(self, registry: CollectorRegistry, info: worker_pb2.WorkerInfo, tally: Tally) -> None:
        shape = {"block_size": info.block_size, "num_blocks": info.num_blocks}
        self._worker = WorkerMetrics(registry, info.model, **shape, prefix="outrider_draft_")
        registry.register(_TallyCollector(info.model, tally))

    def observe(self, report: Report, load: Load) -> None:
        """One turn of the loop."""
        self._worker.load(
            num_running=load.num_running, num_waiting=load.num_waiting, num_free_blocks=load.num_free_blocks
        )
        if report.proposals:
            self._worker.step(report.round_s)


class _TallyCollector(Collector):
    """What was proposed, by source, and what went differently from plan."""

    def __init__(self, model_name: str, tally: Tally) -> None:
        self._model_name = model_name
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        tally = self._tally
        for name, meaning, value in (
            ("draft_proposals", "Proposals sent, those without tokens included.", tally.num_proposals),
            ("draft_declined", "Proposals without tokens.", tally.num_declined),
            ("draft_prepared", "Trees of what may come instead of a proposal.", tally.num_prepared),
            ("draft_divergences", "Guesses that a commit contradicted.", tally.num_diverged),
            ("draft_sequence_errors", "Sequences that ended by a fault.", tally.num_failed),
            ("draft_step_failures", "Rounds that failed and were repeated one by one.", tally.num_round_failures),
            ("draft_unknown_sequence_messages", "Messages about sequences that are not open.", tally.num_unknown),
        ):
            family = CounterMetricFamily(f"outrider_{name}", meaning, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        proposed = CounterMetricFamily(
            "outrider_draft_proposed_tokens", "Tokens proposed to targets.", labels=["model_name", "source"]
        )
        for source, count in list(tally.num_draft_tokens.items()):
            proposed.add_metric([self._model_name, source], count)
        yield proposed
