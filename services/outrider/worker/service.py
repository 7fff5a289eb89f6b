"""What the services of draft and target workers share: messages become events for the step loop, its reports become
messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from outrider.rpc.link import Over, answering, read_stream
from outrider.rpc.outbox import MAX_UNREAD_MESSAGES, Outbox
from outrider.rpc.v1 import worker_pb2
from outrider.runtime.supervision import until_first_ends
from outrider.worker.events import DrainExpired, DrainStarted, Load, PeerStreamEnded, WorkerEvent, WorkerReport
from outrider.worker.loop import Deliver, StepLoop, StepMachine

log = logging.getLogger(__name__)

E = TypeVar("E")
R = TypeVar("R", bound=WorkerReport)
Q = TypeVar("Q")
A = TypeVar("A")
R_contra = TypeVar("R_contra", contravariant=True)

PrefixListener = Callable[[list[bytes], list[bytes]], object]
"""Called in the event loop with the block hashes that were added to and removed from the prefix cache."""
MakeSteps = Callable[[StepMachine[E, R], Deliver[R]], StepLoop[E, R]]
"""What runs a machine: the shipped loop, or a simulation of it."""


class Metrics(Protocol[R_contra]):
    def observe(self, report: R_contra, load: Load) -> None:
        """One turn of the loop."""
        ...


class WorkerServicer(ABC, Generic[E, R, Q, A]):
    """One stream per peer. Lives in the event loop in which it was made; the machine lives on the step thread.

    E: events of this kind of worker, R: reports, Q: messages of a peer, A: answers.
    """

    def __init__(
        self,
        machine: StepMachine[E, R],
        info: worker_pb2.WorkerInfo,
        metrics: Metrics[R] | None = None,
        prefix_listener: PrefixListener = lambda added, removed: None,
        make_steps: MakeSteps[E, R] = StepLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.drained = asyncio.Event()
        """Set once nothing is open, and nothing will be."""
        self.streams: Streams[A] = Streams(clock)
        self._clock = clock
        self._metrics = metrics
        self._prefix_listener = prefix_listener
        self._draining = False
        self._event_loop = asyncio.get_running_loop()
        self.steps = make_steps(machine, self._hand_over)

    async def __aenter__(self) -> Self:
        self.steps.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.steps.stop)

    def step_limit_s(self, most_s: float) -> float:
        """Longest a step may last, in seconds: at most `most_s`. May be called from any thread."""
        return most_s

    def load_message(self) -> worker_pb2.WorkerLoad:
        load = self.steps.load
        return worker_pb2.WorkerLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=load.num_free_blocks,
            draining=self._draining,
            prefill_token_ns=load.prefill_token_ns,
            row_ns=load.row_ns,
            num_sequences=load.num_sequences,
        )

    def start_drain(self) -> None:
        """Opens are refused from now on; the load shows it at once."""
        self._draining = True
        self.post(DrainStarted())

    def expire_drain(self) -> None:
        """Returns all open sequences to their peers."""
        self.post(DrainExpired())

    def post(self, *events: E | WorkerEvent) -> None:
        self.steps.post(events)

    # A coroutine that writes, not a generator: its `finally` then runs when the call ends, not when it is collected.
    async def _serve(self, context: Any) -> None:
        """Serves one stream to its end. Raises Overloaded when its peer has stopped reading."""
        async with self.streams.open(context) as (number, over):

            def received(request: Q) -> None:
                self.steps.post(self._events_of(number, request))

            try:
                await until_first_ends(read_stream(context, received), over())
            finally:
                # On every kind of end: half-closed, cancelled, past its deadline, or the connection lost.
                self.steps.post([PeerStreamEnded(number)])
                self._stream_ended(number)

    @abstractmethod
    def _events_of(self, stream: int, request: Q) -> Iterable[E | WorkerEvent]:
        """The events of a message. Does not raise."""

    @abstractmethod
    def _dispatch(self, report: R) -> None:
        """Called in the event loop after each turn; must lead to `_tell`."""

    def _stream_ended(self, stream: int) -> None:
        """A peer's stream has ended."""

    def _hand_over(self, report: R) -> None:
        """Runs on the step thread."""
        with suppress(RuntimeError):  # the event loop is closed: no peer is left
            self._event_loop.call_soon_threadsafe(self._dispatch, report)

    def _tell(self, answers: Mapping[int, A], report: R) -> None:
        for stream, answer in answers.items():
            self.streams.answer(stream, answer)
        # Peers wait for answers, so these are sent first.
        self._event_loop.call_soon(self._note, report)

    def _note(self, report: R) -> None:
        if report.prefix_added or report.prefix_removed:
            self._prefix_listener(report.prefix_added, report.prefix_removed)
        if self._metrics is not None:
            self._metrics.observe(report, self.steps.load)
        if self.steps.load.drained:
            self.drained.set()


@dataclass(slots=True, eq=False)
class _Stream(Generic[A]):
    """The answering side of one peer's stream."""

    outbox: Outbox[A]
    answered_s: float
    """When the last message was queued, in seconds of the clock."""


class Streams(Generic[A]):
    """Lives in the event loop. A: answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.max_unread = MAX_UNREAD_MESSAGES
        self._clock = clock
        self._open: dict[int, _Stream[A]] = {}
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def open(self, context: Any) -> AsyncIterator[tuple[int, Over]]:
        """A new stream's number, which may be answered within the block; and what ends it, as `answering`."""
        number, outbox = next(self._numbers), Outbox[A](self.max_unread)
        self._open[number] = _Stream(outbox, self._clock())
        async with answering(context, outbox) as over:
            try:
                yield number, over
            finally:
                self._open.pop(number, None)

    def answer(self, number: int, answer: A) -> None:
        """Sends nothing if the stream has ended."""
        if (stream := self._open.get(number)) is None:
            return
        stream.answered_s = self._clock()
        stream.outbox.put(answer)
        if stream.outbox.unread:
            # The stream ends, and its peer continues its sequences elsewhere.
            del self._open[number]

    def unanswered(self, for_s: float) -> list[int]:
        now_s = self._clock()
        return [number for number, stream in self._open.items() if now_s - stream.answered_s >= for_s]

    def end(self) -> None:
        """Ends all streams. Their peers would keep them open."""
        for stream in self._open.values():
            stream.outbox.break_off()
        self._open.clear()

    async def flushed(self) -> None:
        """Returns when gRPC has taken every message made so far."""
        await asyncio.gather(*(stream.outbox.idle.wait() for stream in self._open.values()))
