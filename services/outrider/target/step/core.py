"""What a target does with events and reports, whatever runs its sequences. Owned by one thread; knows no network.

A fault in one sequence ends that sequence, with an error that names the reason.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, assert_never

from outrider.drafting.source import DraftSource
from outrider.errors import InvalidRequest, Overloaded, Unavailable, without_frames
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import Grammar
from outrider.target.drafts.calibration import Fit
from outrider.target.drafts.drafts import Drafts
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests import events
from outrider.target.requests.events import Event
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport, TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Timer
from outrider.target.samples import SampleRecorder
from outrider.target.step.accounting import StepAccounting
from outrider.worker.events import (
    Closed,
    DrainExpired,
    DrainStarted,
    Failed,
    Opened,
    PeerStreamEnded,
    Refused,
    SequenceKey,
)
from outrider.worker.watchdog import StepPace

log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic seconds."""


class CoreSequence(Protocol):
    """One sequence of a target."""

    opening: SequenceSpec
    timer: Timer
    drafts: SequenceDrafts
    grammar_s: float

    def take_grammar(self, grammar: Grammar) -> None:
        """It may run from here on."""
        ...

    def grammar_worked(self, seconds: float) -> None:
        """A thread has worked on its grammar."""
        ...


S = TypeVar("S", bound=CoreSequence)


class KnownSequences(Generic[S]):
    """Those that are open, in the order of opening."""

    def __init__(self, stats: TargetStats) -> None:
        self._stats = stats
        self._open: dict[SequenceKey, S] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._open

    def __iter__(self) -> Iterator[S]:
        return iter(self._open.values())

    @property
    def keys(self) -> list[SequenceKey]:
        return list(self._open)

    def get(self, key: SequenceKey) -> S | None:
        return self._open.get(key)

    def find(self, key: SequenceKey) -> S | None:
        """None, which is counted, when it is not open: a message about it came late, or it was never opened."""
        sequence = self._open.get(key)
        if sequence is None:
            self._stats.num_unknown += 1
        return sequence

    def remove(self, key: SequenceKey) -> S | None:
        """Forgets the sequence. None when it is not open."""
        return self._open.pop(key, None)


class TargetCore(ABC, Generic[S]):
    """The sequences of one target: they are opened, change, fail and end in the same way on every engine."""

    def __init__(
        self,
        sequences: KnownSequences[S],
        accounting: StepAccounting,
        limits: Limits,
        pace: StepPace,
        clock: Clock,
        sources: Sequence[DraftSource] = (),
        samples: SampleRecorder | None = None,
    ) -> None:
        """`sources`: those of drafts that are made in this process."""
        self.stats = accounting.stats
        self.pace = pace
        self.draining = False
        self._sequences = sequences
        self._accounting = accounting
        self._limits = limits
        self._clock = clock
        self._drafts = Drafts(sources, self.stats, accounting.calibration)
        self._samples = samples
        self._report = TargetReport()

    @abstractmethod
    def _start(self, event: Opened, drafts: SequenceDrafts) -> None:
        """Takes the sequence in. What is wrong with it alone is raised, or ends it with `_refuse`."""

    @abstractmethod
    def _prefix_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Prefixes that were added to the cache, and those removed, since the last call."""

    def _drop_prefixes(self) -> None:
        """Empties the prefix cache, where it is this target's own."""
        return

    def _see(self, row: StepRow[S], start: int, states: Any) -> None:
        """Shows sources the states of the row's committed positions from `start` on, before the commit that gives the
        token after them; what heads on draft workers read of them is sent with it."""
        features = self._drafts.see(row.key, start, states)
        if row.decides and features:
            row.features = features.pop()
        self._report.features += [(row.key, row.base_len, each) for each in features]

    def take_report(self) -> TargetReport:
        """What happened since the last call. May be empty."""
        report, self._report = self._report, TargetReport()
        if self._samples is not None:
            self._samples.note(report)
            self.stats.num_dropped_samples = self._samples.num_dropped
        report.row_price = self._accounting.row_price
        report.best_chance = self._accounting.calibration.best(Fit())
        report.prefix_added, report.prefix_removed = map(list, self._prefix_changes())
        return report

    def apply(self, event: Event) -> None:
        """Applies one event; a fault in it ends its sequence and is reported."""
        match event:
            case events.Offered() | events.DraftRefused():
                self._offer(event)
            case Opened():
                self._open(event)
            case events.Compiled():
                if (sequence := self._sequences.find(event.key)) is not None:
                    self._guarded(event.key, sequence, partial(sequence.take_grammar, event.grammar))
            case events.GrammarWork():
                if (sequence := self._sequences.get(event.key)) is not None:
                    sequence.grammar_worked(event.seconds)
            case events.Adjusted():
                if self._sequences.find(event.key) is not None:
                    self._drafts.limit(event.key, event.speculation)
            case events.Erased():
                self._erase(event)
            case Closed():
                if self._sequences.find(event.key) is not None:
                    self._remove(event.key)
            case PeerStreamEnded():
                for key in [key for key in self._sequences.keys if key.stream == event.stream]:
                    self._remove(key)
            case Refused():
                self.fail(event.key, event.error)
            case DrainStarted():
                self.draining = True
            case DrainExpired():
                self.fail_all(Unavailable("the worker is shutting down"))
            case _:
                assert_never(event)

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        for key in self._sequences.keys:
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
            drafts = self._drafts.open(key, event.opening, event.tokens)
            if self._samples is not None:
                self._samples.open(key, event.opening)
            self._start(event, drafts)

    def _erase(self, event: events.Erased) -> None:
        if not event.samples:
            # Of all tenants: whose a block is, only the hash of its salt and tokens knows.
            self._drop_prefixes()
            if self._limits.grammars is not None:
                self._limits.grammars.forget(event.tenant)
            event.done(self._drafts.erase(event.tenant, event.ordered_us))
        elif self._samples is None:
            event.done(0)
        else:
            self._samples.erase(event.tenant, event.ordered_us, event.done)

    def _offer(self, event: events.Offered | events.DraftRefused) -> None:
        if (sequence := self._sequences.find(event.key)) is None:
            return
        try:
            if isinstance(event, events.DraftRefused):
                raise event.error
            sequence.drafts.offer(event.tree)
            if sequence.drafts.answered:
                sequence.timer.draft_answered(event.received_s)
        except Exception as error:
            # A draft only affects latency: the sequence continues without it.
            self.stats.num_refused_drafts += 1
            self._report.refused_drafts.append(Failed(event.key, without_frames(error)))

    def _guarded(self, key: SequenceKey, sequence: S, action: Callable[[], None], when: str = "at its opening") -> None:
        """Ends the sequence if the action fails."""
        try:
            action()
        except Exception as error:
            self._failed(key, sequence, error, when)

    def _failed(self, key: SequenceKey, sequence: S, error: Exception, when: str) -> None:
        if not isinstance(error, InvalidRequest | Overloaded):
            log.error("a sequence failed %s", when, exc_info=error, extra=sequence.opening.log_fields)
            self.stats.num_step_failures += 1
        self.fail(key, error)

    def _report_step(self, rows: Sequence[StepRow[Any]], started_s: float) -> float:
        """After all its commits. Returns the seconds of the step."""
        ended_s = self._clock()
        for row in rows:
            row.sequence.timer.step_ended(started_s, ended_s, decides=row.decides)
        num_tokens = sum(row.num_run for row in rows)
        self._report.step_us = round((ended_s - started_s) * 1e6)
        self._report.batch_sequences = len(rows)
        self._report.batch_tokens = num_tokens
        self.pace.stepped(ended_s - started_s, num_tokens)
        self._accounting.divide(rows, ended_s - started_s)
        for row in rows:
            row.stepped()
        return ended_s - started_s

    def fail(self, key: SequenceKey, error: Exception) -> None:
        self._remove(key)
        # Frames of the step refer to the sequence, and to the error.
        self._report.failures.append(Failed(key, without_frames(error)))

    def _remove(self, key: SequenceKey) -> None:
        sequence = self._sequences.remove(key)
        self._drafts.close(key)
        if sequence is not None:
            # After the steps' shares, which a router bounds by the time of the steps.
            sequence.timer.times.share_s += sequence.grammar_s
            self.stats.busy_s += sequence.grammar_s
            self._report.removed.append((key, sequence.timer.times))
