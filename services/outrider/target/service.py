"""TargetService: one stream per router, on a target worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from outrider.drafting.pool import DraftLeases, ReadLeases, no_leases
from outrider.errors import NotFound
from outrider.protocol.tokenizers import chunks_of
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import target_pb2, target_pb2_grpc, worker_pb2
from outrider.runtime.turns import settle
from outrider.target.drafts.pool import PoolDrafts
from outrider.target.metrics import TargetMetrics
from outrider.target.requests.events import Compiled, Erased, Event, GrammarWork, TargetEvent
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.wire import empty_response, events_of, response_of
from outrider.target.step.worker import TargetWorker
from outrider.worker.events import Opened, Refused
from outrider.worker.loop import StepLoop
from outrider.worker.service import MakeSteps, PrefixListener, WorkerServicer


class TargetServicer(
    WorkerServicer[TargetEvent, TargetReport, target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    target_pb2_grpc.TargetServiceServicer,
):
    def __init__(
        self,
        worker: TargetWorker[Any],
        info: worker_pb2.WorkerInfo,
        limits: Limits,
        prefix_listener: PrefixListener = lambda added, removed: None,
        metrics: TargetMetrics | None = None,
        make_steps: MakeSteps[TargetEvent, TargetReport] = StepLoop[TargetEvent, TargetReport],
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = create_channel,
        max_silence_s: float = 1.0,
        read_leases: ReadLeases = no_leases,
        tokenizer: bytes = b"",
        credential: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """`connect`: to the drafts that routers name, with `credential` as metadata of each call; `read_leases`: the
        leases of drafts; `tokenizer`: what gateways need, serialised. A stream that was sent nothing for
        `max_silence_s` seconds is sent a message at the next step, even an empty one."""
        super().__init__(worker, info, metrics, prefix_listener, make_steps, clock)
        self.stats = worker.stats
        self._pace = worker.pace
        self._limits = limits
        self._tokenizer = tokenizer
        self._compiling: set[asyncio.Task[None]] = set()
        self._max_silence_s = max_silence_s
        leases = DraftLeases(read_leases, clock)
        self.drafts = PoolDrafts(
            *(limits, clock, self.steps.post, self.streams.answer, leases, connect, credential, worker.stats),
            features=info.features,
            deepen=worker.engine.deepen,
        )

    async def __aexit__(self, *exception: object) -> None:
        for task in self._compiling:
            task.cancel()
        await self.drafts.stop()
        await super().__aexit__(*exception)

    def step_limit_s(self, most_s: float) -> float:
        return self._pace.limit_s(most_s)

    async def GetInfo(
        self, request: target_pb2.TargetServiceGetInfoRequest, context: object
    ) -> target_pb2.TargetServiceGetInfoResponse:
        return target_pb2.TargetServiceGetInfoResponse(info=self.info, load=self.load_message())

    async def GetTokenizer(
        self, request: target_pb2.TargetServiceGetTokenizerRequest, context: object
    ) -> AsyncIterator[target_pb2.TargetServiceGetTokenizerResponse]:
        if not self._tokenizer:
            raise NotFound("this target has no tokenizer that a gateway could use")
        for chunk in chunks_of(self._tokenizer):
            yield target_pb2.TargetServiceGetTokenizerResponse(chunk=chunk)

    async def EraseHistory(
        self, request: target_pb2.EraseHistoryRequest, context: object
    ) -> target_pb2.EraseHistoryResponse:
        erased = Future[target_pb2.EraseHistoryResponse]()

        def done(count: int, volume_id: str = "", held: bool = False) -> None:
            settle(erased, lambda: target_pb2.EraseHistoryResponse(num_texts=count, volume_id=volume_id, held=held))

        self.post(Erased(request.tenant, request.samples, request.ordered_unix_us, done))
        return await asyncio.wrap_future(erased)

    # The generated type knows generators only.
    async def Verify(  # type: ignore[override]
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> None:
        await self._serve(context)

    def _events_of(self, stream: int, request: target_pb2.VerifyRequest) -> Iterable[Event]:
        events = list(events_of(request, stream, self._limits, self._clock()))
        self.drafts.apply(stream, request, self._for_drafts(events))
        for event in events:
            if isinstance(event, Opened) and event.spec.has_grammar:
                task = self._event_loop.create_task(self._compile(event))
                self._compiling.add(task)
                task.add_done_callback(self._compiling.discard)
        return events

    def _for_drafts(self, events: Sequence[Event]) -> Sequence[Event]:
        """As drafts are to follow them."""
        return events

    async def _compile(self, opened: Opened) -> None:
        """Compiles the sequence's grammar and posts it. Other sequences continue meanwhile."""
        spec, compiler = opened.spec, self._limits.grammars
        assert compiler is not None, "openings that need one are refused without"
        assert spec.logits is not None
        worked = lambda seconds: self.post(GrammarWork(opened.key, seconds))  # noqa: E731
        asked = spec.logits.grammar, spec.committed, spec.tenant
        try:
            self.post(Compiled(opened.key, await compiler.compile_on_thread(*asked, worked)))
        except Exception as error:
            self.post(Refused(opened.key, error))

    def _stream_ended(self, stream: int) -> None:
        self.drafts.stream_ended(stream)

    def _dispatch(self, report: TargetReport) -> None:
        self.drafts.take_report(report)
        # Drafts wait for commits, so these are sent before the responses are built.
        self._event_loop.call_soon(lambda: self._tell(response_of(report), report))

    def _note(self, report: TargetReport) -> None:
        if report.batch_sequences:
            self._tell_progress(report)
        super()._note(report)

    def _tell_progress(self, report: TargetReport) -> None:
        """Reports that a step has ended: a long prefill commits nothing for minutes, and a router must know that it
        runs."""
        for number in self.streams.unanswered(self._max_silence_s):
            self.streams.answer(number, empty_response(report))
