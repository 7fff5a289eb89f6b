"""Traces of requests, round by round, while they run and for a while after. Bounded; never holds a prompt.

`TraceServicer` serves them. Spans for a collector are made in `spans`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
from outrider.errors import InvalidRequest, UnknownRequest
from outrider.protocol.convert import mode_to_proto
from outrider.protocol.rounds import RequestStats, Round
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import trace_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sequence.speculation import Speculation

from outrider_controller.router.config import TraceConfig
from outrider_controller.router.observe.activity import Activity, Work
from outrider_controller.router.request.checks import Request
from outrider_controller.router.request.state import RequestState

SERVICE = "outrider.rpc.v1.TraceService"
_MAX_EVENTS = 64
MAX_LISTED = 10_000
"""Most running requests listed in one answer."""


def now_us() -> int:
    """The router's only clock for durations: its event loop's, monotonic, which a simulation can replace."""
    return int(asyncio.get_running_loop().time() * 1e6)


class TraceBatch(NamedTuple):
    """The size of a target's step."""

    sequences: int
    tokens: int


OnEnd = Callable[["KeptTrace", Request], None]
"""Called for each request that has ended. Must not block."""


@dataclass(frozen=True, slots=True)
class KeptTrace:
    """One request's trace. Its messages are built only when they are read."""

    request_id: str
    head: bytes
    """A serialized RequestTrace without rounds."""
    rounds: Sequence[Round]

    def message(self) -> trace.RequestTrace:
        message = trace.RequestTrace.FromString(self.head)
        message.rounds.extend(done.to_trace() for done in self.rounds)
        return message


class Recorder:
    """The trace of a running request. Times are of the router's monotonic clock, in microseconds."""

    def __init__(self, config: TraceConfig, request: Request, router_id: str, now_us: int, unix_us: int) -> None:
        self.request = request
        self.num_kept = 0
        """Rounds that are kept, and sources of drafts in each."""
        self.trace = trace.RequestTrace(
            request_id=request.request_id,
            tenant=request.tenant,
            model=request.model,
            router_id=router_id,
            trace_id=request.trace_context.trace_id,
            speculation=request.choice or router.SPECULATION_MODE_AUTO,
            temperature=request.params.temperature,
            prompt_tokens=len(request.prompt),
            resumed_tokens=len(request.committed),
            mode=mode_to_proto(request.mode),
            started_unix_us=unix_us,
            running=True,
        )
        self._max_rounds, self._record_tokens = config.max_rounds, config.record_tokens
        self._rounds: list[Round] = []
        self._started_us = now_us
        self._state: RequestState | None = None
        self._on: dict[worker.WorkerRole.ValueType, str] = {}
        self._lost: set[worker.WorkerRole.ValueType] = set()

    def placed(self, state: RequestState, now_us: int) -> None:
        self._state = state
        self.trace.placing_us = max(0, now_us - self._started_us)

    def opened(self, info: worker.WorkerInfo, now_us: int) -> None:
        self._on[info.role] = info.worker_id
        self._lost.discard(info.role)
        self._event(trace.TRACE_EVENT_KIND_OPENED, info, now_us)

    def lost(self, info: worker.WorkerInfo, reason: str, now_us: int) -> None:
        self._lost.add(info.role)
        self._event(trace.TRACE_EVENT_KIND_LOST, info, now_us, reason)

    def round(self, done: Round, *, setting: Speculation, batch: TraceBatch, now_us: int) -> None:
        """Adds one applied commit. Its tokens are dropped unless they are to be kept: nobody reads them afterwards."""
        if not self._rounds:
            self.trace.cached_tokens = done.num_cached_tokens
        if len(self._rounds) >= self._max_rounds:
            self.trace.num_rounds_omitted += 1
            return
        if not self._record_tokens:
            done.token_ids = done.rejected = []
        done.at_us = now_us - self._started_us
        done.max_draft_tokens, done.max_wait_us = setting.max_draft_tokens, setting.max_wait_us
        done.batch_sequences, done.batch_tokens = batch
        self._rounds.append(done)
        self.num_kept += 1 + len(done.sources)

    def forget_tokens(self) -> None:
        self._record_tokens = False
        for done in self._rounds:
            done.token_ids = done.rejected = []

    def kept(self, now_us: int, ended: str | None = None) -> KeptTrace:
        """The trace as of now. `ended`: the call has ended for this reason, unused when the request is finished."""
        self.trace.duration_us = max(0, now_us - self._started_us)
        if self._state is not None:
            self.trace.finish_reason = sequence.FinishReason.ValueType(self._state.finish_reason)
            self.trace.metrics.CopyFrom(self._state.stats.to_proto())
            self.trace.output_tokens = len(self._state.committed) - self.trace.resumed_tokens
        if ended is not None:
            self.trace.running = False
            if not self.trace.finish_reason:
                self.trace.error = ended or "CANCELLED"
        return KeptTrace(self.trace.request_id, self.trace.SerializeToString(), tuple(self._rounds))

    def fits(self, request: trace.GetActivityRequest) -> bool:
        return request.tenant in ("", self.request.tenant) and (
            not request.worker_id or request.worker_id in self._on.values()
        )

    def work(self) -> Work:
        state, workers = self._state, tuple(self._on.values())
        if state is None:
            return Work(self.request.tenant, workers, 0, RequestStats())
        return Work(self.request.tenant, workers, len(state.committed) - self.trace.resumed_tokens, state.stats)

    def running(self, now_us: int) -> trace.RunningSequence:
        work, request = self.work(), self.request
        return trace.RunningSequence(
            request_id=request.request_id,
            tenant=request.tenant,
            model=request.model,
            router_id=self.trace.router_id,
            target_id=self._open_on(worker.WORKER_ROLE_TARGET),
            draft_id=self._open_on(worker.WORKER_ROLE_DRAFT),
            started_unix_us=self.trace.started_unix_us,
            duration_us=max(0, now_us - self._started_us),
            prompt_tokens=self.trace.prompt_tokens,
            output_tokens=work.output_tokens,
            max_draft_tokens=self._rounds[-1].max_draft_tokens if self._rounds else 0,
            num_draft_tokens=work.stats.num_draft_tokens,
            num_verified_tokens=work.stats.num_verified_tokens,
            num_accepted_draft_tokens=work.stats.num_accepted_draft_tokens,
        )

    def _open_on(self, role: worker.WorkerRole.ValueType) -> str:
        return "" if role in self._lost else self._on.get(role, "")

    def _event(
        self, kind: trace.TraceEventKind.ValueType, info: worker.WorkerInfo, now_us: int, reason: str = ""
    ) -> None:
        if len(self.trace.events) >= _MAX_EVENTS:
            return
        self.trace.events.add(
            at_us=max(0, now_us - self._started_us),
            position=self._state.committed_len if self._state is not None else 0,
            kind=kind,
            role=info.role,
            worker_id=info.worker_id,
            model=info.model,
            reason=reason,
        )


class Traces:
    """One router's traces: of all running requests, and of those that ended last."""

    def __init__(self, config: TraceConfig, router_id: str = "", on_end: OnEnd | None = None) -> None:
        self._config = config
        self._router_id = router_id
        self._on_end = on_end
        # In the order of arrival.
        self._running: dict[Recorder, None] = {}
        self._activity = Activity()
        self._ended: deque[KeptTrace] = deque()
        self._num_rounds = 0
        self._erased_us: dict[str, int] = {}
        """When a tenant's traces were last ordered to be erased."""

    def __len__(self) -> int:
        """Requests that have ended and are remembered."""
        return len(self._ended)

    def start(self, request: Request, now_us: int) -> Recorder:
        recorder = Recorder(self._config, request, self._router_id, now_us, time.time_ns() // 1000)
        self._running[recorder] = None
        return recorder

    def end(self, recorder: Recorder, error: str, now_us: int) -> None:
        """Remembers the trace, and forgets the oldest ones beyond the bounds."""
        del self._running[recorder]
        self._activity.ended(recorder.work())
        kept = recorder.kept(now_us, error)
        if self._on_end is not None:
            self._on_end(kept, recorder.request)
        if recorder.request.consent_unix_us < self._erased_us.get(recorder.request.tenant, 0):
            return
        self._ended.append(kept)
        self._num_rounds += len(kept.rounds)
        while len(self._ended) > self._config.max_requests or self._num_rounds > self._config.max_total_rounds:
            self._num_rounds -= len(self._ended.popleft().rounds)

    def erase(self, tenant: str, ordered_us: int) -> int:
        """Those of running requests are forgotten when they end. Returns the number of the others."""
        self._erased_us[tenant] = max(ordered_us, self._erased_us.get(tenant, 0))
        for recorder in self._running:
            if recorder.request.tenant == tenant:
                recorder.forget_tokens()
        before, kept = len(self._ended), [one for one in self._ended if one.message().tenant != tenant]
        self._ended = deque(kept)
        self._num_rounds = sum(len(one.rounds) for one in kept)
        return before - len(kept)

    def find(self, request_id: str, now_us: int) -> list[trace.RequestTrace]:
        """Oldest first; several when the gateway submitted the request again. Empty when none is known."""
        running = [recorder.kept(now_us) for recorder in self._running if recorder.request.request_id == request_id]
        known = [kept.message() for kept in (*self._ended, *running) if kept.request_id == request_id]
        return sorted(known, key=lambda found: found.started_unix_us)

    def export(self, request: trace.ExportTracesRequest) -> Iterator[trace.RequestTrace]:
        """Those that have ended, as they are remembered now."""
        wanted = frozenset(request.request_ids)
        for kept in [one for one in self._ended if not wanted or one.request_id in wanted]:
            message = kept.message()
            if request.tenant in ("", message.tenant) and request.model in ("", message.model):
                yield message if request.tokens else _without_tokens(message)

    def running(self, request: trace.GetActivityRequest, now_us: int) -> trace.GetActivityResponse:
        """The running requests that match `request`, and the sums of all."""
        fitting = [recorder for recorder in self._running if recorder.fits(request)]
        return trace.GetActivityResponse(
            sequences=[recorder.running(now_us) for recorder in fitting[: request.max_sequences]],
            num_sequences=len(fitting),
            activities=self._activity.sums(recorder.work() for recorder in self._running),
        )


def _without_tokens(message: trace.RequestTrace) -> trace.RequestTrace:
    for one in message.rounds:
        del one.token_ids[:], one.rejected_token_ids[:]
    return message


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Reads, and erases."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    async def GetTrace(
        self, request: trace.GetTraceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trace.GetTraceResponse:
        if not request.request_id:
            raise InvalidRequest("request_id", "is missing")
        found = self._traces.find(request.request_id, now_us())
        if not found:
            raise UnknownRequest(
                f"no trace of {request.request_id[:128]!r} on this router: it carried no such request, or has "
                f"forgotten it (it remembers {len(self._traces)} requests that have ended)"
            )
        return trace.GetTraceResponse(traces=found)

    async def ExportTraces(
        self, request: trace.ExportTracesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[trace.ExportTracesResponse]:
        for found in self._traces.export(request):
            yield trace.ExportTracesResponse(trace=found)

    async def GetActivity(
        self, request: trace.GetActivityRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trace.GetActivityResponse:
        if request.max_sequences > MAX_LISTED:
            raise InvalidRequest("max_sequences", f"{request.max_sequences}; at most {MAX_LISTED}")
        return self._traces.running(request, now_us())

    async def EraseTraces(
        self, request: trace.EraseTracesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trace.EraseTracesResponse:
        return trace.EraseTracesResponse(num_traces=self._traces.erase(request.tenant, request.ordered_unix_us))
