"""The draft worker: applies events to its sequences and decides what to run next.

Has no threads and no network: events in, a report out. Nothing here blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import assert_never

from outrider.draft import events
from outrider.draft.events import DraftReport, DraftStats, Event, Proposed
from outrider.draft.sequences import OpenDraftSequences
from outrider.drafters import CommitMismatch, Drafter, DraftSequence
from outrider.engine import DeviceLost
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.tree import DraftTree
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
from outrider.worker.faults import check_engine
from outrider.worker.step_cost import StepCost

log = logging.getLogger(__name__)

Outcome = DraftTree | Exception | None
"""For one sequence. None: it is still catching up."""


class DraftRounds:
    """Runs the drafter, and divides its time among the sequences of a round."""

    def __init__(self, drafter: Drafter, stats: DraftStats, clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._stats = stats
        self._clock = clock
        self._cost = StepCost()

    @property
    def row_s(self) -> float:
        """Seconds that one more sequence adds to a round."""
        return self._cost.row_s

    def draft(self, due: Sequence[DraftSequence]) -> Sequence[Outcome]:
        """A proposal for each sequence, or the error that it failed with. Raises DeviceLost and WholeStepFailed."""
        started_s = self._clock()
        proposals = self._together(due)
        if all(isinstance(one, Exception) for one in proposals):
            check_engine(self._drafter.check)
        spent_s = self._clock() - started_s
        # Not while some sequences catch up with their prompts: only the drafter knows how many tokens of those it ran.
        if not any(one is None or isinstance(one, Exception) for one in proposals):
            self._cost.took(rows=len(due), seconds=spent_s)
        self._stats.busy_s += spent_s
        for found in due:
            found.compute_s += spent_s
            # Each has a row in all forwards of the round.
            found.share_s += spent_s / len(due)
        return proposals

    def _together(self, sequences: Sequence[DraftSequence]) -> Sequence[Outcome]:
        try:
            return self._drafter.draft(sequences)
        except DeviceLost:
            raise
        except Exception as error:
            log.error("a round failed", exc_info=error)
            self._stats.num_round_failures += 1
        # If one sequence broke the round, only that one should end.
        return [self._alone(sequence) for sequence in sequences]

    def _alone(self, sequence: DraftSequence) -> Outcome:
        try:
            return self._drafter.draft([sequence])[0]
        except DeviceLost:
            raise
        except Exception as error:
            log.error("a sequence failed in its round", exc_info=error, extra=sequence.spec.log_fields)
            return error


class DraftWorker:
    """The sequences of all targets, and the drafter that serves them. Owned by one thread."""

    def __init__(self, drafter: Drafter, max_sequences: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = DraftStats()
        self.draining = False
        self._drafter = drafter
        self._max_sequences = max_sequences
        self._clock = clock
        self._sequences = OpenDraftSequences()
        self._rounds = DraftRounds(drafter, self.stats, clock)
        self._report = DraftReport()

    @property
    def has_work(self) -> bool:
        """Whether a proposal is due."""
        return bool(self._sequences.due)

    @property
    def load(self) -> Load:
        known, free = self._sequences, self._drafter.num_free_blocks
        row_ns = round(self._rounds.row_s * 1e9)
        return Load(known.num_running, len(known.due), free, len(known), self.draining, row_ns=row_ns)

    def take_report(self) -> DraftReport:
        """What happened since the last call. May be empty."""
        report, self._report = self._report, DraftReport()
        report.prefix_added, report.prefix_removed = self._drafter.take_prefix_changes()
        return report

    def apply(self, event: Event) -> None:
        """Applies one event; a fault in it ends its sequence and is reported."""
        match event:
            case Opened():
                self._start(event)
            case events.DraftCommitted() | events.Limited():
                found = self._sequences.find(event.key)
                if found is None:
                    self.stats.num_unknown += 1
                elif isinstance(event, events.DraftCommitted):
                    self._commit(found, event)
                else:
                    self._limit(found, event)
            case Closed():
                if event.key in self._sequences:
                    self._remove(event.key)
                else:
                    self.stats.num_unknown += 1
            case PeerStreamEnded():
                for key in [key for key in self._sequences.keys if key.stream == event.stream]:
                    self._remove(key)
            case Refused():
                self.fail(event.key, event.error)
            case DrainStarted():
                self.draining = True
            case DrainExpired():
                self.fail_all(Unavailable("the worker is shutting down", reason="DRAINING"))
            case _:
                assert_never(event)

    def step(self) -> float | None:
        """One round for every sequence whose proposal is due."""
        started_s = self._clock()
        if due := self._sequences.due:
            for (key, found), outcome in zip(due.items(), self._rounds.draft([*due.values()]), strict=True):
                self._answer(key, found, outcome)
        self._report.round_s = self._clock() - started_s
        return 0.0 if self.has_work else None

    def fail_all(self, error: Exception) -> None:
        for key in self._sequences.keys:
            self.fail(key, error)

    def _answer(self, key: SequenceKey, found: DraftSequence, outcome: Outcome) -> None:
        if outcome is None:
            return
        if isinstance(outcome, Exception):
            self.fail(key, outcome)
            return
        self._sequences.clear_due(key)
        spent = found.since_s, found.compute_s, found.share_s
        self._report.proposals.append(Proposed(key, found.epoch, outcome, found.spec, *spent))
        found.compute_s = found.share_s = 0.0
        self.stats.num_proposals += 1
        self.stats.num_declined += not outcome.token_ids
        self.stats.num_draft_tokens[outcome.source] += outcome.depth

    def _start(self, event: Opened) -> None:
        key = event.key
        if key in self._sequences:
            # A later message could mean either of the two: both end.
            self.fail(key, InvalidRequest("sequence_id", "already open"))
        elif self.draining:
            self.fail(key, Unavailable("the worker is draining", reason="DRAINING"))
        elif len(self._sequences) >= self._max_sequences:
            self.fail(key, Overloaded(f"all {self._max_sequences} sequences are taken"))
        else:
            self._take_in(event)

    def _take_in(self, event: Opened) -> None:
        try:
            found = self._drafter.open(event.spec)
        except InvalidRequest as error:
            self.fail(event.key, error)
            return
        self._sequences.add(event.key, found, event.received_s)

    def _commit(self, found: DraftSequence, event: events.DraftCommitted) -> None:
        epoch = found.epoch
        try:
            due = event.features is not None and self._drafter.see(found, event.features)
            self._drafter.commit(found, event.base_len, event.token_ids)
        except CommitMismatch as error:
            self.fail(event.key, InvalidRequest("base_len", str(error), reason="COMMIT_MISMATCH"))
            return
        except InvalidRequest as error:
            self.fail(event.key, error)
            return
        self.stats.num_diverged += found.epoch - epoch
        if event.finished:
            # Releases the sequence's KV.
            self._remove(event.key)
            self._sequences.finish(event.key)
        elif due or event.token_ids:
            self._sequences.make_due(event.key, found, event.received_s)

    def _limit(self, found: DraftSequence, event: events.Limited) -> None:
        grown = event.limits.max_draft_tokens > found.limits.max_draft_tokens
        self._drafter.set_limits(found, event.limits)
        if not event.limits.max_draft_tokens:
            self._sequences.clear_due(event.key)
        elif grown:
            self._sequences.make_due(event.key, found, event.received_s)

    def fail(self, key: SequenceKey, error: Exception) -> None:
        self._remove(key)
        self._report.failures.append(Failed(key, error))
        self.stats.num_failed += 1

    def _remove(self, key: SequenceKey) -> None:
        found = self._sequences.remove(key)
        if found is not None:
            self._drafter.close(found)
            if found.share_s:
                self._report.removed.append((key, found.share_s))
