"""The draft worker: which sequences are open, which of them wait for a proposal, and the rounds that serve them.

Pure of threads and network: events in, a report out. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from outrider.draft import events
from outrider.draft.events import Event
from outrider.draft.report import DraftStats, Proposed, Report
from outrider.drafters import CommitMismatch, Drafted, Drafter, DraftSequence
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.worker.events import Closed, DrainExpired, DrainStarted, Refused, SequenceKey, StreamEnded
from outrider.worker.report import Failed, Load
from outrider.worker.step_cost import StepCost

log = logging.getLogger(__name__)

# A system that lets who computes finish its turn of some milliseconds would keep what was just said from being sent,
# where a worker has a single core. Nobody waits for what is guessed ahead.
_BEFORE_RUNNING_AHEAD_S = 0.0005


@dataclass(slots=True)
class _Open:
    """One opened sequence. Without `sequence` it has finished and only waits to be closed."""

    sequence: DraftSequence | None
    compute_s: float = 0.0
    """Rounds it was part of since it was last answered."""
    share_s: float = 0.0
    """Its part of all rounds since it was last spoken of."""


class DraftWorker:
    """Sequences of all routers and the drafter that serves them. Owned by one thread."""

    def __init__(self, drafter: Drafter, max_sequences: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = DraftStats()
        self.draining = False
        self._drafter = drafter
        self._max_sequences = max_sequences
        self._clock = clock
        self._cost = StepCost()
        self._open: dict[SequenceKey, _Open] = {}
        # Sequences whose next proposal is due, with the time of what it answers; who waits longest comes first.
        self._due: dict[SequenceKey, float] = {}
        # Sequences whose guess may grow while the target judges it.
        self._ahead: set[SequenceKey] = set()
        self._report = Report()

    @property
    def has_work(self) -> bool:
        """Whether somebody waits for a proposal, or one may be continued ahead."""
        return bool(self._due or self._ahead)

    @property
    def load(self) -> Load:
        running = sum(1 for o in self._open.values() if o.sequence is not None and o.sequence.limits.max_draft_tokens)
        free = self._drafter.num_free_blocks
        return Load(running, len(self._due), free, len(self._open), self.draining, row_ns=round(self._cost.row_s * 1e9))

    def take_report(self) -> Report:
        """What happened since the last call. May be empty."""
        report, self._report = self._report, Report()
        report.prefix_added, report.prefix_removed = self._drafter.take_prefix_changes()
        return report

    def apply(self, event: Event) -> None:
        """Follows one event; a fault in it ends its sequence and is reported."""
        match event:
            case events.Opened():
                self._start(event)
            case events.Committed():
                self._commit(event)
            case events.Limited():
                self._limit(event)
            case Closed():
                if self._remove(event.key) is None:
                    self.stats.num_unknown += 1
            case StreamEnded():
                for key in [k for k in self._open if k.stream == event.stream]:
                    self._remove(key)
            case Refused():
                self._fail(event.key, event.error)
            case DrainStarted():
                self.draining = True
            case DrainExpired():
                self.fail_all(Unavailable("the worker is shutting down", reason="DRAINING"))
            case _:
                assert_never(event)

    def step(self) -> float | None:
        """One round for every sequence whose proposal is due; while none is, one forward ahead for the others."""
        started_s = self._clock()
        self._round(started_s)
        ended_s = self._clock()
        self._report.round_s = ended_s - started_s
        if self._due:
            return 0.0
        if not self.has_work:
            return None
        return ended_s + _BEFORE_RUNNING_AHEAD_S if self._report.proposals or self._report.failures else 0.0

    def _round(self, started_s: float) -> None:
        if not self._due:
            self._run_ahead()
            return
        keys = [key for key in self._due if self._open[key].sequence is not None]
        sequences = [s for key in keys if (s := self._open[key].sequence) is not None]
        if not sequences:
            return
        outcomes = self._draft(sequences)
        spent_s = self._clock() - started_s
        # Not while some of them catch up with their prompts: how much of those was run is the drafter's.
        if not any(outcome is None or isinstance(outcome, Exception) for outcome in outcomes):
            self._cost.took(rows=len(sequences), seconds=spent_s)
        self._divide(keys, spent_s)
        for key, sequence, outcome in zip(keys, sequences, outcomes, strict=True):
            self._open[key].compute_s += spent_s
            if isinstance(outcome, Exception):
                self._fail(key, outcome)
            elif outcome is not None:
                self._propose(key, sequence, outcome)

    def _run_ahead(self) -> None:
        keys = list(self._ahead)
        sequences = [s for key in keys if (s := self._open[key].sequence) is not None]
        if not sequences:
            return
        since_s = self._clock()
        try:
            added = self._drafter.run_ahead(sequences)
        except Exception as error:
            # Nobody waits for these. The next commit tells whose fault it was, if it was a sequence's.
            log.error("running ahead failed", exc_info=error)
            self.stats.num_round_failures += 1
            self._ahead.clear()
            return
        self._divide(keys, self._clock() - since_s)
        for key, sequence, drafted in zip(keys, sequences, added, strict=True):
            if not drafted.token_ids:
                self._ahead.discard(key)
                continue
            base_len = sequence.committed_len + len(sequence.guess.token_ids) - len(drafted.token_ids)
            self._report_proposal(key, sequence, base_len, drafted, since_s, self._clock() - since_s, run_ahead=True)

    def _divide(self, keys: Sequence[SequenceKey], seconds: float) -> None:
        """A round's time among its sequences: each has a row in all of its forwards."""
        self.stats.busy_s += seconds
        for key in keys:
            self._open[key].share_s += seconds / len(keys)

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        for key in list(self._open):
            self._fail(key, error)

    def _draft(self, sequences: Sequence[DraftSequence]) -> Sequence[Drafted | Exception | None]:
        try:
            return self._drafter.draft(sequences)
        except Exception as error:
            log.error("a round failed", exc_info=error)
            self.stats.num_round_failures += 1
        # One of them may be what broke the round, and only that one should end.
        return [self._draft_alone(sequence) for sequence in sequences]

    def _draft_alone(self, sequence: DraftSequence) -> Drafted | Exception | None:
        try:
            return self._drafter.draft([sequence])[0]
        except Exception as error:
            log.error("a sequence failed in its round", exc_info=error, extra=sequence.opening.log_fields)
            return error

    def _propose(self, key: SequenceKey, sequence: DraftSequence, drafted: Drafted) -> None:
        compute_s, self._open[key].compute_s = self._open[key].compute_s, 0.0
        self._report_proposal(key, sequence, sequence.committed_len, drafted, self._due.pop(key), compute_s)
        self.stats.num_proposals += 1
        self.stats.num_declined += not drafted.token_ids
        if drafted.token_ids and len(drafted.token_ids) < sequence.reach:
            self._ahead.add(key)

    def _report_proposal(
        self,
        key: SequenceKey,
        sequence: DraftSequence,
        base_len: int,
        drafted: Drafted,
        since_s: float,
        compute_s: float,
        *,
        run_ahead: bool = False,
    ) -> None:
        opening = sequence.opening
        share_s, self._open[key].share_s = self._open[key].share_s, 0.0
        self._report.proposals.append(
            Proposed(
                *(key, sequence.epoch, base_len, drafted, opening.params, opening.mode),
                since_s=since_s,
                compute_s=compute_s,
                share_s=share_s,
                run_ahead=run_ahead,
            )
        )
        self.stats.num_draft_tokens[drafted.source] += len(drafted.token_ids)

    def _start(self, event: events.Opened) -> None:
        key = event.key
        if key in self._open:
            # Which of the two a later message means could not be told: neither may go on.
            self._fail(key, InvalidRequest("sequence_id", "already open"))
        elif self.draining:
            self._fail(key, Unavailable("the worker is draining", reason="DRAINING"))
        elif len(self._open) >= self._max_sequences:
            self._fail(key, Overloaded(f"all {self._max_sequences} sequences are taken"))
        else:
            sequence = self._drafter.open(event.opening)
            self._open[key] = _Open(sequence)
            self._make_due(key, sequence, event.received_s)

    def _commit(self, event: events.Committed) -> None:
        sequence = self._find(event.key)
        if sequence is None:
            return
        epoch = sequence.epoch
        try:
            self._drafter.commit(sequence, event.base_len, event.token_ids)
        except CommitMismatch as error:
            self._fail(event.key, InvalidRequest("base_len", str(error), reason="COMMIT_MISMATCH"))
            return
        self.stats.num_diverged += sequence.epoch - epoch
        if event.finished:
            self._finish(event.key)
        else:
            self._make_due(event.key, sequence, event.received_s)

    def _limit(self, event: events.Limited) -> None:
        sequence = self._find(event.key)
        if sequence is None:
            return
        grown = event.limits.max_draft_tokens > sequence.limits.max_draft_tokens
        self._drafter.set_limits(sequence, event.limits)
        if not event.limits.max_draft_tokens:
            self._rest(event.key)
        elif grown:
            self._make_due(event.key, sequence, event.received_s)

    def _make_due(self, key: SequenceKey, sequence: DraftSequence, since_s: float) -> None:
        if not sequence.limits.max_draft_tokens:
            return
        # A sequence that already waits keeps its place, or one that commits often would never catch up.
        self._due[key] = since_s
        self._ahead.discard(key)

    def _rest(self, key: SequenceKey) -> None:
        self._due.pop(key, None)
        self._ahead.discard(key)

    def _find(self, key: SequenceKey) -> DraftSequence | None:
        found = self._open.get(key)
        if found is None or found.sequence is None:
            self.stats.num_unknown += 1
            return None
        return found.sequence

    def _finish(self, key: SequenceKey) -> None:
        """Frees what the sequence holds; its id stays known until the router closes it."""
        self._remove(key)
        self._open[key] = _Open(None)

    def _fail(self, key: SequenceKey, error: Exception) -> None:
        self._remove(key)
        self._report.failures.append(Failed(key, error))
        self.stats.num_failed += 1

    def _remove(self, key: SequenceKey) -> _Open | None:
        self._rest(key)
        found = self._open.pop(key, None)
        if found is not None and found.sequence is not None:
            self._drafter.close(found.sequence)
            if found.share_s:
                self._report.removed.append((key, found.share_s))
        return found
