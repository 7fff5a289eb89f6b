"""TargetService: translates messages to events, hands them to the step loop, and reports back to messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

import grpc

from outrider.rpc.answers import stop_writing, write_answers
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import sequence_pb2, target_pb2, target_pb2_grpc, worker_pb2
from outrider.target.draft_leases import DraftLeases, ReadLeases, no_leases
from outrider.target.draft_link import Connect
from outrider.target.events import DrainExpired, DrainStarted, Event, StreamEnded
from outrider.target.loop import MakeSteps, StepLoop
from outrider.target.metrics import TargetMetrics
from outrider.target.opening import Limits
from outrider.target.pairs import Pairs
from outrider.target.report import Load, Report
from outrider.target.sequence import SequenceKey
from outrider.target.wire import empty_response, events_of, response_of
from outrider.target.worker import TargetWorker

log = logging.getLogger(__name__)

_Outbox = asyncio.Queue[target_pb2.VerifyResponse | None]
_Context = grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse]

PrefixListener = Callable[[list[bytes], list[bytes]], None]
"""Told which block hashes were added to and removed from the prefix cache; called in the event loop."""


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """One stream per router. Lives in the event loop in which it was made; the worker lives on the step thread."""

    def __init__(
        self,
        worker: TargetWorker,
        info: worker_pb2.WorkerInfo,
        limits: Limits,
        prefix_listener: PrefixListener = lambda added, removed: None,
        metrics: TargetMetrics | None = None,
        make_steps: MakeSteps = StepLoop,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = create_channel,
        max_silence_s: float = 1.0,
        read_leases: ReadLeases = no_leases,
    ) -> None:
        """`connect`: to the drafts that routers name; `read_leases`: which of them there are. A stream
        that heard nothing for `max_silence_s` hears of the next step, whatever is in it."""
        self.info = info
        self.drained = asyncio.Event()
        """Set once nothing is open and nothing will be."""
        self.tally = worker.tally
        self._limits = limits
        self._draining = False
        self._prefix_listener = prefix_listener
        self._metrics = metrics
        self._clock = clock
        self._outboxes: dict[int, _Outbox] = {}
        self._max_silence_s = max_silence_s
        self._answered_s: dict[int, float] = {}
        """By stream, when it was told something last."""
        self._streams = itertools.count(1)
        self._event_loop = event_loop = asyncio.get_running_loop()
        self._steps = make_steps(worker, lambda report: _hand_over(event_loop, self._dispatch, report))
        self.pairs = Pairs(limits, clock, self._steps.post, self._answer, DraftLeases(read_leases, clock), connect)

    async def __aenter__(self) -> TargetServicer:
        self._steps.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.pairs.stop()
        await asyncio.to_thread(self._steps.stop)

    @property
    def load(self) -> Load:
        return self._steps.load

    async def flushed(self) -> None:
        """Returns when gRPC has taken every message made so far."""
        await asyncio.gather(*(outbox.join() for outbox in self._outboxes.values()))

    def load_message(self) -> worker_pb2.WorkerLoad:
        load = self.load
        return worker_pb2.WorkerLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=load.num_free_blocks,
            draining=self._draining,
        )

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
        self, request: target_pb2.TargetServiceGetInfoRequest, context: object
    ) -> target_pb2.TargetServiceGetInfoResponse:
        return target_pb2.TargetServiceGetInfoResponse(info=self.info, load=self.load_message())

    # A coroutine that writes, not a generator: its end is then certain to come when the call ends, not when it is
    # collected. The generated type knows generators only.
    async def Verify(  # type: ignore[override]
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: _Context
    ) -> None:
        stream = next(self._streams)
        outbox = self._outboxes[stream] = _Outbox()
        self._answered_s[stream] = self._clock()
        writer = asyncio.create_task(write_answers(outbox, context), name=f"write stream {stream}")
        try:
            async for request in request_iterator:
                self.pairs.apply(stream, request)
                self._steps.post(list(events_of(request, stream, self._limits, self._clock())))
        finally:
            # However it ended: half-closed, cancelled, past its deadline, or the router is gone.
            self._steps.post([StreamEnded(stream)])
            self.pairs.stream_ended(stream)
            del self._outboxes[stream], self._answered_s[stream]
            await stop_writing(writer, outbox)

    def _dispatch(self, report: Report) -> None:
        draft_stats = self.pairs.follow(report)
        # What goes to drafts is waited for, and leaves before the rest is made.
        self._event_loop.call_soon(self._tell, report, draft_stats)

    def _tell(self, report: Report, draft_stats: Mapping[SequenceKey, sequence_pb2.DraftStats]) -> None:
        for stream, response in response_of(report, draft_stats).items():
            self._answer(stream, response)
        if report.batch_sequences:
            self._tell_progress(report)
        if report.prefix_added or report.prefix_removed:
            self._prefix_listener(report.prefix_added, report.prefix_removed)
        if self._metrics is not None:
            self._metrics.observe(report, self.load)
        if self.load.drained:
            self.drained.set()

    def _tell_progress(self, report: Report) -> None:
        """A long prefill commits nothing for minutes: by ended steps a router tells it from a worker that hangs."""
        now_s = self._clock()
        for stream, answered_s in self._answered_s.items():
            if now_s - answered_s >= self._max_silence_s:
                self._answer(stream, empty_response(report))

    def _answer(self, stream: int, response: target_pb2.VerifyResponse) -> None:
        if (outbox := self._outboxes.get(stream)) is not None:
            self._answered_s[stream] = self._clock()
            outbox.put_nowait(response)


def _hand_over(event_loop: asyncio.AbstractEventLoop, dispatch: Callable[[Report], None], report: Report) -> None:
    with suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
        event_loop.call_soon_threadsafe(dispatch, report)
