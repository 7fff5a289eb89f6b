"""A target: what becomes of events, of the rows that its engine runs, and of their drafts. Owned by one thread; knows
neither network nor engine.

A fault in one sequence ends that sequence, with an error that names the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, assert_never

from outrider.drafting.source import DraftSource, Seen
from outrider.errors import InvalidRequest, Overloaded, Unavailable, without_frames
from outrider.sequence.key import Finish
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import Grammar
from outrider.target.drafts.calibration import Fit
from outrider.target.drafts.drafts import Drafts
from outrider.target.requests import events
from outrider.target.requests.events import Event
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport, TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.samples import SampleRecorder
from outrider.target.step.accounting import StepAccounting
from outrider.target.step.port import EnginePort, S
from outrider.worker.events import (
    Closed,
    DrainExpired,
    DrainStarted,
    Failed,
    Load,
    Opened,
    PeerStreamEnded,
    Refused,
    SequenceKey,
)
from outrider.worker.watchdog import StepPace

log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic seconds."""


class TargetWorker(Generic[S]):
    """The sequences of one target: they are opened, change, commit, fail and end in the same way on every engine."""

    def __init__(
        self,
        engine: EnginePort[S],
        limits: Limits,
        clock: Clock,
        sources: Sequence[DraftSource] = (),
        samples: SampleRecorder | None = None,
    ) -> None:
        """`sources`: those of drafts that are made in this process. `samples`: None where nothing may be recorded."""
        self.stats = TargetStats()
        self.engine = engine
        self.draining = False
        self._sequences: dict[SequenceKey, S] = {}
        """Those that are open, in the order of opening."""
        self._accounting = StepAccounting(self.stats, engine.capabilities)
        self._limits = limits
        self._clock = clock
        self._drafts = Drafts(sources, self.stats, engine.capabilities.calibration, engine.deepen)
        self._samples = samples
        self._report = TargetReport()

    @property
    def pace(self) -> StepPace:
        return self.engine.capabilities.pace

    @property
    def load(self) -> Load:
        known, room, cost = len(self._sequences), self.engine.room(), self.engine.capabilities.cost
        times_ns = round(cost.prompt_token_s * 1e9), round(cost.row_s * 1e9)
        waiting = max(0, known - room.num_running)
        return Load(room.num_running, waiting, room.num_free_blocks, known, self.draining, *times_ns)

    def step(self) -> float | None:
        """Runs one engine step.

        Returns when to call again if no event comes before: 0 for at once, None for never, else monotonic seconds.
        """
        started_s = self._clock()
        self._drafts.poll()
        drafting_s = self._clock() - started_s
        step = self.engine.run(self._sequences.values(), started_s, self._drafts.taps)
        if step.seconds is not None:
            started_s = self._clock() - step.seconds
        self._see(step.rows)
        for row in step.rows:
            row.sequence.timer.step_began(started_s)
            try:
                self._settle(row)
            except Exception as error:
                self._failed(row.key, row.sequence.spec, error, "in its step")
        if step.rows:
            self._report_step(step.rows, started_s, drafting_s)
        self.stats.num_preemptions = self.engine.num_preemptions
        return step.wake_at_s

    def _settle(self, row: StepRow[S]) -> None:
        if row.error is not None:
            raise row.error
        self.engine.follow(row)
        if row.token_ids or row.finish is not Finish.NONE:
            self._commit(row)
        if row.finish is not Finish.NONE:
            self._remove(row.key)

    def _commit(self, row: StepRow[S]) -> None:
        if self.engine.capabilities.plans_ahead:
            self._drafts.follow(row.key, row.base_len, row.token_ids)
        else:
            self._drafts.commit(row)
        row.times = row.sequence.timer.take()
        row.logprobs = row.sequence.spec.asked_logprobs(row.top)
        verified = row.verified
        row.count_sources(verified)
        self._report.commits.append(row)
        self._accounting.committed(row, verified)

    def _see(self, rows: Sequence[StepRow[S]]) -> None:
        """Shows sources the states; what heads on draft workers read of them is sent ahead of the commits."""
        shown = {row.key: row for row in rows if row.states is not None and row.error is None}
        if shown:
            found = self._drafts.see([Seen(key, row.start, row.states) for key, row in shown.items()])
            self._report.features += [(key, shown[key].base_len, each) for key, each in found]
        for row in rows:
            row.states = None

    def take_report(self) -> TargetReport:
        """What happened since the last call. May be empty."""
        report, self._report = self._report, TargetReport()
        if self._samples is not None:
            self._samples.note(report)
            self.stats.num_dropped_samples = self._samples.num_dropped
        report.row_price = self.engine.row_price
        report.best_chance = self.engine.capabilities.calibration.best(Fit())
        report.prefix_added, report.prefix_removed = map(list, self.engine.prefix_changes())
        return report

    def apply(self, event: Event) -> None:
        """Applies one event; a fault in it ends its sequence and is reported."""
        match event:
            case events.Offered():
                if (sequence := self._find(event.key)) is not None:
                    self._offer(sequence, event)
            case Opened():
                self._open(event)
            case events.Compiled():
                if (sequence := self._find(event.key)) is not None:
                    self._begin(event.key, sequence, event.grammar)
            case events.GrammarWork():
                if (sequence := self._sequences.get(event.key)) is not None:
                    sequence.grammar_worked(event.seconds)
            case events.Adjusted():
                if self._find(event.key) is not None:
                    self._drafts.limit(event.key, event.speculation)
            case events.Paired():
                self._drafts.paired(event.key, event.bits)
            case events.Erased():
                self._erase(event)
            case Closed():
                if self._find(event.key) is not None:
                    self._remove(event.key)
            case PeerStreamEnded():
                for key in [key for key in self._sequences if key.stream == event.stream]:
                    self._remove(key)
            case Refused():
                self.fail(event.key, event.error)
            case DrainStarted():
                self.draining = True
            case DrainExpired():
                self.fail_all(Unavailable("the worker is shutting down"))
            case _:
                assert_never(event)

    def _find(self, key: SequenceKey) -> S | None:
        """None, which is counted, when it is not open: a message about it came late, or it was never opened."""
        sequence = self._sequences.get(key)
        if sequence is None:
            self.stats.num_unknown += 1
        return sequence

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        for key in list(self._sequences):
            self.fail(key, error)

    def _open(self, event: Opened) -> None:
        key = event.key
        if key in self._sequences:
            # A later message could mean either of the two: both end.
            self.fail(key, InvalidRequest("sequence_id", "already open"))
        elif self.draining:
            self.fail(key, Unavailable("the worker is draining"))
        elif len(self._sequences) >= self._limits.max_sequences:
            self.fail(key, Overloaded(f"all {self._limits.max_sequences} sequences are taken"))
        else:
            self._start(event)

    def _start(self, event: Opened) -> None:
        drafts = self._drafts.open(event.key, event.spec, event.tokens)
        try:
            sequence = self.engine.open(event, drafts, self._limits)
        except Exception as error:
            self._failed(event.key, event.spec, error, "at its opening")
            return
        self._sequences[event.key] = sequence
        if self._samples is not None:
            self._samples.open(event.key, event.spec)
        if not event.spec.has_grammar:
            self._begin(event.key, sequence, None)

    def _begin(self, key: SequenceKey, sequence: S, grammar: Grammar | None) -> None:
        try:
            sequence.take_grammar(grammar)
        except Exception as error:
            self._failed(key, sequence.spec, error, "at its opening")

    def _erase(self, event: events.Erased) -> None:
        if not event.samples:
            # Of all tenants: whose a block is, only the hash of its salt and tokens knows.
            self.engine.drop_prefixes()
            if self._limits.grammars is not None:
                self._limits.grammars.forget(event.tenant)
            event.done(self._drafts.erase(event.tenant, event.ordered_us))
        elif self._samples is None:
            event.done(0)
        else:
            self._samples.erase(event.tenant, event.ordered_us, event.done)

    def _offer(self, sequence: S, event: events.Offered) -> None:
        try:
            sequence.drafts.offer(event.tree)
            if sequence.drafts.answered:
                sequence.timer.draft_answered(event.received_s)
        except Exception as error:
            # A draft only affects latency: the sequence continues without it.
            log.error("a draft cannot be taken", exc_info=error, extra=sequence.spec.log_fields)
            self.stats.num_source_failures += 1

    def _failed(self, key: SequenceKey, spec: SequenceSpec, error: Exception, when: str) -> None:
        if not isinstance(error, InvalidRequest | Overloaded):
            log.error("a sequence failed %s", when, exc_info=error, extra=spec.log_fields)
            self.stats.num_step_failures += 1
        self.fail(key, error)

    def _report_step(self, rows: Sequence[StepRow[Any]], started_s: float, drafting_s: float) -> None:
        """After all its commits."""
        ended_s = self._clock()
        for row in rows:
            row.sequence.timer.step_ended(started_s, ended_s, decides=row.decides)
        num_tokens = sum(row.num_run for row in rows)
        self._report.step_us = round((ended_s - started_s) * 1e6)
        self._report.batch_sequences = len(rows)
        self._report.batch_tokens = num_tokens
        self.pace.stepped(ended_s - started_s, num_tokens)
        self._accounting.stepped(rows, ended_s - started_s, drafting_s)
        for row in rows:
            row.stepped()

    def fail(self, key: SequenceKey, error: Exception) -> None:
        self._remove(key)
        # Frames of the step refer to the sequence, and to the error.
        self._report.failures.append(Failed(key, without_frames(error)))

    def _remove(self, key: SequenceKey) -> None:
        sequence = self._sequences.pop(key, None)
        self._drafts.close(key)
        if sequence is not None:
            self.engine.close(sequence)
            # After the steps' shares, which a router bounds by the time of the steps.
            sequence.timer.times.share_s += sequence.grammar_s
            self.stats.busy_s += sequence.grammar_s
            self._report.removed.append((key, sequence.timer.times))
