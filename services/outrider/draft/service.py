"""DraftService: one stream per target, on a draft worker."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from outrider.draft.events import DraftEvent, Event
from outrider.draft.metrics import DraftMetrics
from outrider.draft.report import Report
from outrider.draft.wire import Limits, events_of, responses_of
from outrider.draft.worker import DraftWorker
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from outrider.worker.loop import StepLoop
from outrider.worker.service import MakeSteps, PrefixListener, WorkerServicer


class DraftServicer(
    WorkerServicer[DraftEvent, Report, draft_pb2.DraftRequest, draft_pb2.DraftResponse],
    draft_pb2_grpc.DraftServiceServicer,
):
    def __init__(
        self,
        worker: DraftWorker,
        info: worker_pb2.WorkerInfo,
        limits: Limits,
        metrics: DraftMetrics,
        prefix_listener: PrefixListener,
        make_steps: MakeSteps[DraftEvent, Report] = StepLoop[DraftEvent, Report],
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
        await self._serve(request_iterator, context)

    def _events_of(self, stream: int, request: draft_pb2.DraftRequest) -> Iterable[Event]:
        return list(events_of(request, stream, self._limits, self._clock()))

    def _dispatch(self, report: Report) -> None:
        self._tell(responses_of(report, self._clock()), report)
