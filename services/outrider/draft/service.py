"""DraftService: one stream per target, on a draft worker; and the metrics that its reports feed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry

from outrider.draft.events import DraftEvent, DraftReport, DraftStats, Event
from outrider.draft.wire import ProposalLimits, events_of, responses_of
from outrider.draft.worker import DraftWorker
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from outrider.telemetry.metrics import CounterCollector, CounterRow, WorkerMetrics
from outrider.worker.events import Load
from outrider.worker.loop import StepLoop
from outrider.worker.service import MakeSteps, PrefixListener, WorkerServicer


class DraftServicer(
    WorkerServicer[DraftEvent, DraftReport, draft_pb2.DraftRequest, draft_pb2.DraftResponse],
    draft_pb2_grpc.DraftServiceServicer,
):
    def __init__(
        self,
        worker: DraftWorker,
        info: worker_pb2.WorkerInfo,
        limits: ProposalLimits,
        metrics: DraftMetrics,
        prefix_listener: PrefixListener,
        make_steps: MakeSteps[DraftEvent, DraftReport] = StepLoop[DraftEvent, DraftReport],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(worker, info, metrics, prefix_listener, make_steps, clock)
        self.stats = worker.stats
        self._limits = limits

    async def GetInfo(
        self, request: draft_pb2.DraftServiceGetInfoRequest, context: object
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        return draft_pb2.DraftServiceGetInfoResponse(info=self.info, load=self.load_message())

    # The generated type knows generators only.
    async def Draft(  # type: ignore[override]
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> None:
        await self._serve(context)

    def _events_of(self, stream: int, request: draft_pb2.DraftRequest) -> Iterable[Event]:
        return list(events_of(request, stream, self._limits, self._clock()))

    def _dispatch(self, report: DraftReport) -> None:
        self._tell(responses_of(report, self._clock()), report)


class DraftMetrics:
    """One worker's part of a registry."""

    def __init__(self, registry: CollectorRegistry, info: worker_pb2.WorkerInfo, stats: DraftStats) -> None:
        shape = {"block_size": info.block_size, "num_blocks": info.num_blocks}
        self._worker = WorkerMetrics(registry, info.model, **shape, prefix="outrider_draft_")
        registry.register(CounterCollector(info.model, lambda: _counters(stats)))

    def observe(self, report: DraftReport, load: Load) -> None:
        """One turn of the loop."""
        self._worker.load(
            num_running=load.num_running, num_waiting=load.num_waiting, num_free_blocks=load.num_free_blocks
        )
        if report.proposals:
            self._worker.step(report.round_s)


def _counters(stats: DraftStats) -> tuple[CounterRow, ...]:
    """Proposals by source, and the events that should be rare."""
    return (
        ("draft_busy_seconds", "Time spent drafting.", stats.busy_s),
        ("draft_proposals", "Proposals sent, those without tokens included.", stats.num_proposals),
        ("draft_declined", "Proposals without tokens.", stats.num_declined),
        ("draft_divergences", "Proposals that a commit contradicted.", stats.num_diverged),
        ("draft_sequence_errors", "Sequences that ended by a fault.", stats.num_failed),
        ("draft_step_failures", "Rounds that failed and were repeated one by one.", stats.num_round_failures),
        ("draft_unknown_sequence_messages", "Messages about sequences that are not open.", stats.num_unknown),
        ("draft_proposed_tokens", "Tokens proposed to targets.", stats.num_draft_tokens),
    )
