"""DraftService: translates messages to events, hands them to the step loop, and reports back to messages."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc

from outrider.draft.events import DrainExpired, DrainStarted, Event, StreamEnded
from outrider.draft.loop import MakeSteps, StepLoop
from outrider.draft.metrics import DraftMetrics
from outrider.draft.report import Load, Report
from outrider.draft.wire import Limits, events_of, responses_of
from outrider.draft.worker import DraftWorker
from outrider.rpc.answers import stop_writing, write_answers
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, worker_pb2

# For a router that has stopped reading: what comes on top is dropped.
MAX_UNREAD_MESSAGES = 4096

_Outbox = asyncio.Queue[draft_pb2.DraftResponse | None]

PrefixListener = Callable[[list[bytes], list[bytes]], None]
"""Told which block hashes were added to and removed from the prefix cache; called in the event loop."""

_Context = grpc.aio.ServicerContext[draft_pb2.DraftRequest, draft_pb2.DraftResponse]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """One stream per router. Lives in the event loop in which it was made; the worker lives on the step thread."""

    def __init__(
        self,
        worker: DraftWorker,
        info: worker_pb2.WorkerInfo,
        limits: Limits,
        metrics: DraftMetrics,
        prefix_listener: PrefixListener,
        make_steps: MakeSteps = StepLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.drained = asyncio.Event()
        """Set when a drain has begun and no sequence is open."""
        self.tally = worker.tally
        self.num_unread_dropped = 0
        """Messages that a router left unread for so long that they were dropped."""
        self._limits = limits
        self._draining = False
        self._metrics = metrics
        self._clock = clock
        self._prefix_listener = prefix_listener
        self._outboxes: dict[int, _Outbox] = {}
        self._stream_ids = itertools.count(1)
        self._event_loop = event_loop = asyncio.get_running_loop()
        self._steps = make_steps(worker, lambda report: _hand_over(event_loop, self._dispatch, report))

    async def __aenter__(self) -> DraftServicer:
        self._steps.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self._steps.stop)

    @property
    def load(self) -> Load:
        return self._steps.load

    def load_message(self) -> worker_pb2.WorkerLoad:
        load = self.load
        return worker_pb2.WorkerLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=load.num_free_blocks,
            draining=self._draining,
        )

    async def flushed(self) -> None:
        """Returns when gRPC has taken every message made so far."""
        await asyncio.gather(*(outbox.join() for outbox in self._outboxes.values()))

    def start_drain(self) -> None:
        """Nothing new is opened from now on; the load says so at once."""
        self._draining = True
        self.post(DrainStarted())

    def expire_drain(self) -> None:
        """What is still open is given back."""
        self.post(DrainExpired())

    def post(self, *events: Event) -> None:
        self._steps.post(events)

    async def GetInfo(
        self, request: draft_pb2.DraftServiceGetInfoRequest, context: object
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        return draft_pb2.DraftServiceGetInfoResponse(info=self.info, load=self.load_message())

    # A coroutine that writes, not a generator: its end is then certain to come when the call ends, not when it is
    # collected. The generated type knows generators only.
    async def Draft(  # type: ignore[override]
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: _Context
    ) -> None:
        stream = next(self._stream_ids)
        outbox = self._outboxes[stream] = _Outbox(MAX_UNREAD_MESSAGES)
        writer = asyncio.create_task(write_answers(outbox, context), name=f"write stream {stream}")
        try:
            async for request in request_iterator:
                self._steps.post(list(events_of(request, stream, self._limits, self._clock())))
        finally:
            # However it ended: half-closed, cancelled, past its deadline, or the router is gone.
            self._steps.post([StreamEnded(stream)])
            del self._outboxes[stream]
            await stop_writing(writer, outbox)

    def _dispatch(self, report: Report) -> None:
        for stream, response in responses_of(report, self._clock()).items():
            if (outbox := self._outboxes.get(stream)) is not None:
                self._put(outbox, response)
        # Proposals are waited for, and leave before the rest is done.
        self._event_loop.call_soon(self._note, report)

    def _note(self, report: Report) -> None:
        self._metrics.observe(report, self.load)
        if report.prefix_added or report.prefix_removed:
            self._prefix_listener(report.prefix_added, report.prefix_removed)
        if report.drained:
            self.drained.set()

    def _put(self, outbox: _Outbox, response: draft_pb2.DraftResponse) -> None:
        try:
            outbox.put_nowait(response)
        except asyncio.QueueFull:
            # A draft is only ever a latency matter, and one this old not even that.
            self.num_unread_dropped += 1


def _hand_over(event_loop: asyncio.AbstractEventLoop, dispatch: Callable[[Report], None], report: Report) -> None:
    with suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
        event_loop.call_soon_threadsafe(dispatch, report)
