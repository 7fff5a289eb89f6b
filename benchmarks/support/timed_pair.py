"""A connected target worker and draft worker in virtual time: one thread, no network.

Workers, drafter, engines and messages are the shipped ones. Only clock and connections are simulated, so late messages
are late again in the next run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.draft import wire as draft_wire
from outrider.draft.worker import DraftWorker
from outrider.drafters import Drafter
from outrider.drafting.pool.validator import DraftValidator
from outrider.drafting.source import DraftSource
from outrider.engine import Engine
from outrider.protocol.convert import mode_from_proto
from outrider.rpc.v1 import draft_pb2, sequence_pb2, target_pb2
from outrider.sequence.key import Finish
from outrider.target.requests import wire as target_wire
from outrider.target.requests.events import Event, Offered
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport, TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.step.scheduler import Batching
from outrider.target.step.worker import TargetWorker
from outrider.worker.events import SequenceKey
from outrider.worker.step_cost import StepCost

_STREAM = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Functions that are called for each duration, in virtual seconds."""

    step: Callable[[], float]
    """A step of the target."""
    forward: Callable[[], float]
    """A forward of the draft's model."""
    way: Callable[[], float]
    """A message from one worker to the other. Messages keep their order."""


@dataclass(slots=True)
class TimedPair:
    """Answers one sequence after another. `num_forwards` counts those of the draft's model since its start."""

    target: Engine
    drafter: Drafter
    num_forwards: Callable[[], int]
    timing: Timing
    max_draft_tokens: int = 8
    max_batch_tokens: int = 512
    row_price: Callable[[StepCost], float] = lambda cost: cost.price
    """Price of a drafted row, called for each target step."""
    sources: Sequence[DraftSource] = ()
    """Those of the target's own process."""
    _now: float = 0.0
    _draft_free_at: float = 0.0
    _to_draft: deque[tuple[float, draft_pb2.DraftRequest]] = field(default_factory=deque)
    """Requests with their times of arrival."""
    _to_target: deque[tuple[float, Event]] = field(default_factory=deque)
    _validators: dict[int, DraftValidator] = field(default_factory=dict)
    _limits: Limits = field(init=False)
    _draft_limits: draft_wire.ProposalLimits = field(init=False)
    _target_worker: TargetWorker = field(init=False)
    _draft_worker: DraftWorker = field(init=False)

    def __post_init__(self) -> None:
        info, most = self.target.info, self.max_draft_tokens
        self._limits = Limits(info.vocab_size, info.max_context_len, info.block_size, info.num_blocks)
        self._draft_limits = draft_wire.ProposalLimits(info.max_context_len, most)
        clock = lambda: self._now  # noqa: E731
        batching = Batching(info.block_size, max_batch_tokens=self.max_batch_tokens)
        self._target_worker = TargetWorker(self.target, self._limits, batching, clock, self.row_price, self.sources)
        self._draft_worker = DraftWorker(self.drafter, self._limits.max_sequences, clock)

    @property
    def stats(self) -> TargetStats:
        """The target's counters."""
        return self._target_worker.stats

    def answer(self, opening: sequence_pb2.OpenSequence) -> Iterator[list[int]]:
        """The tokens that each step commits, until the sequence ends. Raises a worker's error."""
        for event in target_wire.events_of(target_pb2.VerifyRequest(opens=[opening]), _STREAM, self._limits, self._now):
            self._target_worker.apply(event)
        self._validators[opening.sequence_id] = self._validator(opening)
        self._tell_draft(draft_pb2.DraftRequest(opens=[opening]))
        finished = False
        while not finished:
            for committed in self._turn():
                finished = committed.finish is not Finish.NONE
                self._follow(committed, finished)
                yield list(committed.token_ids)
        self._advance(self._to_draft[-1][0])

    def _validator(self, opening: sequence_pb2.OpenSequence) -> DraftValidator:
        limits = self._limits
        return DraftValidator(
            mode_from_proto(opening.mode),
            opening.sampling,
            len(opening.prompt_token_ids),
            limits.vocab_size,
            limits.max_context_len,
            opening.speculation.max_draft_tokens,
        )

    def _follow(self, committed: StepRow[Any], finished: bool) -> None:
        number = committed.key.sequence_id
        if finished:
            close = sequence_pb2.CloseSequence(sequence_id=number, reason=sequence_pb2.CLOSE_REASON_FINISHED)
            self._tell_draft(draft_pb2.DraftRequest(closes=[close]))
            return
        commit = sequence_pb2.Commit(sequence_id=number, base_len=committed.base_len, token_ids=committed.token_ids)
        self._tell_draft(draft_pb2.DraftRequest(commits=[commit]))

    def _tell_draft(self, request: draft_pb2.DraftRequest) -> None:
        self._to_draft.append((self._arrival(self._now, self._to_draft), request))

    def _arrival(self, said: float, before: deque[tuple[float, Any]]) -> float:
        return max(said + self.timing.way(), before[-1][0] if before else 0.0)

    # -- the target

    def _turn(self) -> list[StepRow[Any]]:
        """One step of the target, or its wait for a draft."""
        for event in self._arrived():
            self._target_worker.apply(event)
        step_ends = self._now + self.timing.step()
        wake_at = self._target_worker.step()
        until = step_ends if wake_at == 0.0 else min(math.inf if wake_at is None else wake_at, self._next_arrival())
        if math.isinf(until):
            raise RuntimeError("the target waits for nothing")
        self._advance(until)
        return _checked(self._target_worker.take_report()).commits

    def _arrived(self) -> list[Event]:
        found = []
        while self._to_target and self._to_target[0][0] <= self._now:
            found.append(self._to_target.popleft()[1])
        return found

    def _next_arrival(self) -> float:
        """The next arrival at the target, else the draft's next round."""
        if self._to_target:
            return self._to_target[0][0]
        return self._next_round()

    # -- the draft

    def _advance(self, until: float) -> None:
        """Runs the draft while the target works or waits."""
        while (at := self._next_round()) <= until:
            self._round(at)
        self._now = max(self._now, until)

    def _next_round(self) -> float:
        """When the draft begins one; infinite while it has nothing to do."""
        worker = self._draft_worker
        if worker.has_work:
            return self._draft_free_at
        return max(self._draft_free_at, self._to_draft[0][0]) if self._to_draft else math.inf

    def _round(self, at: float) -> None:
        while self._to_draft and self._to_draft[0][0] <= at:
            for event in draft_wire.events_of(self._to_draft.popleft()[1], _STREAM, self._draft_limits, at):
                self._draft_worker.apply(event)
        before = self.num_forwards()
        self._draft_worker.step()
        self._draft_free_at = done = at + sum(self.timing.forward() for _ in range(self.num_forwards() - before))
        for response in draft_wire.responses_of(self._draft_worker.take_report(), done).values():
            if response.errors:
                raise RuntimeError(f"the draft failed: {response.errors[0].reason}")
            arrival = self._arrival(done, self._to_target)
            for draft in response.drafts:
                key = SequenceKey(_STREAM, draft.sequence_id)
                self._to_target.append(
                    (arrival, Offered(key, self._validators[draft.sequence_id].tree(draft), arrival))
                )


def _checked(report: TargetReport) -> TargetReport:
    for failed in [*report.failures, *report.refused_drafts]:
        raise failed.error
    return report
