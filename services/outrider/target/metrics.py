"""Prometheus metrics of a target worker: fed by its reports, and by its counters when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge

from outrider.rpc.v1 import worker_pb2
from outrider.target.requests.report import SourceStats, TargetReport, TargetStats
from outrider.telemetry.metrics import CounterCollector, CounterRow, SpeculationMetrics, TokenMetrics, WorkerMetrics
from outrider.worker.events import Load


class TargetMetrics:
    """One worker's part of a registry."""

    def __init__(
        self, registry: CollectorRegistry, info: worker_pb2.WorkerInfo, stats: TargetStats, execution: str = ""
    ) -> None:
        """`execution`: the implementation of a step, as in ModelInfo; empty when it is not our own engine's."""
        self._worker = WorkerMetrics(registry, info.model, block_size=info.block_size, num_blocks=info.num_blocks)
        self._tokens = TokenMetrics(registry, info.model)
        self._speculation = SpeculationMetrics(registry, info.model)
        if execution:
            kernels = Gauge(
                "outrider_native_kernels",
                "1 if the native CPU kernels run the steps; 0 on a CPU means several times slower steps.",
                ["model_name", "execution"],
                registry=registry,
            )
            kernels.labels(info.model, execution).set(runs_native_kernels(execution))
        registry.register(CounterCollector(info.model, lambda: _counters(stats)))

    def observe(self, report: TargetReport, load: Load) -> None:
        """One turn of the loop."""
        self._worker.load(
            num_running=load.num_running, num_waiting=load.num_waiting, num_free_blocks=load.num_free_blocks
        )
        if report.batch_sequences:
            self._worker.step(report.step_us * 1e-6)
            num_committed = sum(len(committed.token_ids) for committed in report.commits)
            self._tokens.step(report.batch_tokens, num_committed)
        for committed in report.commits:
            if committed.num_prompt_tokens:
                self._tokens.opened(
                    num_prompt_tokens=committed.num_prompt_tokens, num_cached_tokens=committed.num_cached_tokens
                )
            self._speculation.round(
                num_drafted=committed.num_drafted,
                num_verified=committed.num_verified,
                num_accepted=committed.num_accepted,
                num_dropped=committed.num_dropped,
            )


def runs_native_kernels(execution: str) -> bool:
    """Whether these are our kernels for CPUs, of whatever variant."""
    return execution.startswith("native")


def _counters(stats: TargetStats) -> tuple[CounterRow, ...]:
    return (
        ("busy_seconds", "Time in steps.", stats.busy_s),
        ("wasted_seconds", "Time in steps for rows of drafted tokens that were not accepted.", stats.wasted_s),
        ("num_preemptions", "Sequences that lost their KV to others and were recomputed.", stats.num_preemptions),
        ("step_failures", "Sequences that ended by a fault in their step.", stats.num_step_failures),
        ("draft_source_failures", "Faults of sources in the target's own process.", stats.num_source_failures),
        ("refused_drafts", "Malformed drafts.", stats.num_refused_drafts),
        (
            "unleased_drafts",
            "Draft workers that routers named and that hold no lease; they are not called.",
            stats.num_unleased_drafts,
        ),
        ("dropped_draft_tokens", "Draft tokens that came late or with a gap.", stats.num_dropped_tokens),
        ("branch_tokens", "Draft tokens in steps beyond one path of each draft.", stats.num_branch_tokens),
        ("branch_tokens_accepted", "Draft tokens accepted on a branch.", stats.num_branch_tokens_accepted),
        ("dropped_samples", "Samples not recorded as too many waited for their volume.", stats.num_dropped_samples),
        ("unknown_sequence_messages", "Messages about sequences that are not open.", stats.num_unknown),
        *_by_source(dict(stats.sources)),
    )


def _by_source(sources: Mapping[str, SourceStats]) -> Iterator[CounterRow]:
    """A token that several sources propose counts for the one that gives it the greatest chance."""

    def each(read: Callable[[SourceStats], float]) -> dict[str, float]:
        return {name: read(one) for name, one in sources.items()}

    yield (
        "source_drafted_tokens",
        "Draft tokens in steps, all branches included, by source.",
        each(lambda s: s.num_drafted),
    )
    yield "source_verified_tokens", "Draft tokens verified, by source.", each(lambda s: s.num_verified)
    yield "source_accepted_tokens", "Draft tokens accepted, by source.", each(lambda s: s.num_accepted)
    yield "source_row_seconds", "Time of steps for rows of draft tokens, by source.", each(lambda s: s.row_s)
    yield "source_draft_seconds", "Time spent on draft tokens by their source.", each(lambda s: s.draft_s)
