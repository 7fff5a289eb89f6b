"""What became of each request, round by round, while it runs and for a while after. Bounded; never holds a prompt.

A finished trace is kept serialised: a round then takes some fifty bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.router.config import TraceConfig
from outrider_controller.router.policy import Setting
from outrider_controller.router.session import Request, Session

_MAX_EVENTS = 64

OnEnd = Callable[[trace.RequestTrace, Request], None]
"""Told of each request that has ended. Must not block, and must not change the trace."""


class Recorder:
    """One request's trace under way. Times are of the router's monotonic clock, in microseconds."""

    def __init__(self, config: TraceConfig, request: Request, router_id: str, now_us: int, unix_us: int) -> None:
        self.request = request
        self.trace = trace.RequestTrace(
            request_id=request.request_id,
            tenant=request.tenant,
            model=request.model,
            router_id=router_id,
            trace_id=request.trace_context.trace_id,
            speculation=request.speculation or router.SPECULATION_MODE_AUTO,
            temperature=request.sampling.temperature,
            prompt_tokens=len(request.prompt),
            resumed_tokens=len(request.resume),
            started_unix_us=unix_us,
            running=True,
        )
        self._config = config
        self._started_us = now_us
        self._session: Session | None = None

    def placed(self, session: Session) -> None:
        """A target was found; the session begins."""
        self._session = session
        self.trace.mode = session.mode
        self.trace.placing_us = max(0, session.opened_us - self._started_us)

    def opened(self, info: worker.WorkerInfo, now_us: int) -> None:
        self._event(trace.TRACE_EVENT_KIND_OPENED, info, now_us)

    def lost(self, info: worker.WorkerInfo, reason: str, now_us: int) -> None:
        self._event(trace.TRACE_EVENT_KIND_LOST, info, now_us, reason)

    def round(
        self,
        commit: sequence.Commit,
        timing: router.RoundTiming,
        *,
        setting: Setting,
        source: str,
        batch_sequences: int,
        now_us: int,
    ) -> None:
        """One commit that counted."""
        kept = self.trace
        kept.cached_tokens = kept.cached_tokens or commit.num_cached_tokens
        if len(kept.rounds) >= self._config.max_rounds:
            kept.num_rounds_omitted += 1
            return
        tokens = self._config.record_tokens
        kept.rounds.add(
            at_us=max(0, now_us - self._started_us),
            base_len=commit.base_len,
            token_ids=commit.token_ids if tokens else (),
            rejected_token_ids=commit.rejected_token_ids if tokens else (),
            num_tokens=len(commit.token_ids),
            num_drafted=commit.num_drafted,
            num_verified=commit.num_verified,
            num_accepted=commit.num_accepted,
            num_dropped=commit.num_dropped,
            max_draft_tokens=setting.max_draft_tokens,
            max_wait_us=setting.max_wait_us,
            timing=timing,
            batch_sequences=batch_sequences,
            source=source,
        )

    def ended(self, error: str, now_us: int) -> None:
        """`error` is the reason of what ended the call, empty when the request is finished."""
        self.trace.running = False
        self._update(now_us)
        if not self.trace.finish_reason:
            self.trace.error = error or "CANCELLED"

    def snapshot(self, now_us: int) -> trace.RequestTrace:
        """As it stands."""
        self._update(now_us)
        copy = trace.RequestTrace()
        copy.CopyFrom(self.trace)
        return copy

    def _update(self, now_us: int) -> None:
        self.trace.duration_us = max(0, now_us - self._started_us)
        if self._session is not None:
            self.trace.finish_reason = self._session.finish_reason
            self.trace.metrics.CopyFrom(self._session.metrics.message())
            self.trace.output_tokens = len(self._session.committed) - self.trace.resumed_tokens

    def _event(
        self, kind: trace.TraceEventKind.ValueType, info: worker.WorkerInfo, now_us: int, reason: str = ""
    ) -> None:
        if len(self.trace.events) >= _MAX_EVENTS:
            return
        self.trace.events.add(
            at_us=max(0, now_us - self._started_us),
            position=self._session.committed_len if self._session is not None else 0,
            kind=kind,
            role=info.role,
            worker_id=info.worker_id,
            model=info.model,
            reason=reason,
        )


class Traces:
    """One router's traces: of all requests that run, and of the last that have ended."""

    def __init__(self, config: TraceConfig) -> None:
        self.router_id = ""
        self.on_end: OnEnd = lambda ended, request: None
        self._config = config
        self._running: set[Recorder] = set()
        self._ended: deque[tuple[str, bytes]] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        """Requests that have ended and are remembered."""
        return len(self._ended)

    @property
    def num_bytes(self) -> int:
        """Taken by them."""
        return self._num_bytes

    def start(self, request: Request, now_us: int) -> Recorder:
        recorder = Recorder(self._config, request, self.router_id, now_us, time.time_ns() // 1000)
        self._running.add(recorder)
        return recorder

    def end(self, recorder: Recorder, error: str, now_us: int) -> None:
        """Remembers the trace, and forgets the oldest ones beyond the bounds."""
        self._running.remove(recorder)
        recorder.ended(error, now_us)
        self.on_end(recorder.trace, recorder.request)
        message = recorder.trace.SerializeToString()
        self._ended.append((recorder.trace.request_id, message))
        self._num_bytes += len(message)
        while len(self._ended) > self._config.max_requests or self._num_bytes > self._config.max_bytes:
            self._num_bytes -= len(self._ended.popleft()[1])

    def find(self, request_id: str, now_us: int) -> list[trace.RequestTrace]:
        """Oldest first; several when the gateway submitted the request again. Empty when none is known."""
        ended = [trace.RequestTrace.FromString(message) for known, message in self._ended if known == request_id]
        running = [r.snapshot(now_us) for r in self._running if r.trace.request_id == request_id]
        return sorted(ended + running, key=lambda found: found.started_unix_us)
