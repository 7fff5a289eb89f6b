"""The target worker's core: events in, steps run, reports out. Owned by one thread; knows no network.

Only it commits tokens to its sequences. A fault in one sequence ends that sequence, with an error that names the
reason.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

from outrider.engine import Engine, OutOfBlocks
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.protocol.finish import Finish
from outrider.speculation import Verdict, VerificationMode
from outrider.target import events
from outrider.target.calibration import Calibration, Fit
from outrider.target.commit import apply_stop_conditions
from outrider.target.events import Event
from outrider.target.opening import Limits
from outrider.target.report import Committed, Report, TargetStats
from outrider.target.scheduler import Batching, Plan, PlannedRow, Pricing, admissible, plan
from outrider.target.sequence import TargetSequence
from outrider.target.times import Times
from outrider.target.verify import Verified, kv_of, sibling_of, verify_rows
from outrider.worker.events import Closed, DrainExpired, DrainStarted, Refused, SequenceKey, StreamEnded
from outrider.worker.report import Failed, Load
from outrider.worker.step_cost import StepCost, StepShares
from outrider.worker.watchdog import MIN_ON_GPU_S, MIN_S, StepPace

log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic seconds."""
TakeLate = Callable[[Callable[[Event], bool]], Iterable[Event]]
"""Takes the wanted ones of the events that came in during the step; the others follow after it."""


class TargetWorker:
    """Sequences and the engine that runs them."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        batching: Batching,
        clock: Clock,
        take_late: TakeLate = lambda wanted: (),
        row_price: Callable[[StepCost], float] = lambda cost: cost.price,
    ) -> None:
        """`row_price`: the least chance at which a drafted token is verified, as a function of measured step costs."""
        self.stats = TargetStats()
        self.pace = StepPace(batching.max_batch_tokens, MIN_S if engine.info.device == "cpu" else MIN_ON_GPU_S)
        self.draining = False
        self._engine = engine
        self._limits = limits
        self._batching = batching
        self._clock = clock
        self._sequences: dict[SequenceKey, TargetSequence] = {}
        self._serials = itertools.count()
        self._report = Report()
        self._cost = StepCost()
        self._take_late = take_late
        self._row_price = row_price
        self._calibration = Calibration()

    @property
    def load(self) -> Load:
        running = sum(1 for s in self._sequences.values() if s.kv is not None)
        waiting = len(self._sequences) - running
        free, cost = self._engine.kv.num_free_blocks, self._cost
        times_ns = round(cost.prompt_token_s * 1e9), round(cost.row_s * 1e9)
        return Load(running, waiting, free, len(self._sequences), self.draining, *times_ns)

    def take_report(self) -> Report:
        """What happened since the last call. May be empty."""
        report, self._report = self._report, Report()
        report.row_price = self._row_price(self._cost)
        report.best_chance = self._calibration.best(Fit())
        report.prefix_added, report.prefix_removed = self._engine.kv.take_prefix_changes()
        return report

    def apply(self, event: Event) -> None:
        """Applies one event; a fault in it ends its sequence and is reported."""
        match event:
            case events.Opened():
                self._open(event)
            case events.Compiled():
                if sequence := self._find(event.key):
                    sequence.take_grammar(event.grammar)
            case events.Offered() | events.DraftRefused():
                self._offer(event)
            case events.Adjusted():
                if sequence := self._find(event.key):
                    sequence.adjust(event.speculation)
            case Closed():
                if self._find(event.key):
                    self._remove(event.key)
            case StreamEnded():
                for key in [k for k in self._sequences if k.stream == event.stream]:
                    self._remove(key)
            case Refused():
                self._fail(event.key, event.error)
            case DrainStarted():
                self.draining = True
            case DrainExpired():
                self.fail_all(Unavailable("the worker is shutting down"))
            case _:
                assert_never(event)

    def step(self) -> float | None:
        """Runs one engine step.

        Returns when to call again if no event comes before: 0 for at once, None for never, else monotonic seconds.
        """
        started_s = self._clock()
        planned = self._schedule(started_s)
        for sequence, until_s in planned.held:
            sequence.held_until_s = until_s
        if not planned.rows:
            return planned.wake_at_s
        try:
            results = verify_rows(self._engine, planned.rows, lambda: self._poll_late_drafts(planned.rows))
        except OutOfBlocks as error:
            # The plan and the pool disagree. Preempting the newest sequence is always safe.
            log.error("planned a step that does not fit: %s", error)
            self._recover(planned.rows)
            return 0.0
        self._finish_step(planned.rows, results, started_s)
        return 0.0

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        for key in list(self._sequences):
            self._fail(key, error)

    def _schedule(self, now_s: float) -> Plan:
        for sequence in admissible(list(self._sequences.values()), self._batching, self._engine.kv.num_free_blocks):
            # Cached tokens have no logits, so the prefix cache is not used.
            cached = () if sequence.wants_prompt_logprobs else sequence.tokens
            sequence.kv = self._engine.kv.open(cached, sequence.opening.salt)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = min(sequence.cached_len, len(sequence.opening.prompt))
        price = self._row_price(self._cost)
        pricing = Pricing(
            price,
            self._calibration,
            self._engine.num_free_tokens,
            sibling_price=price if self._engine.runs_siblings else math.inf,
        )
        while True:
            free_blocks = self._engine.kv.num_free_blocks
            planned = plan(list(self._sequences.values()), self._batching, free_blocks, now_s, pricing)
            if planned.victim is None:
                return planned
            self._preempt(planned.victim)

    def _preempt(self, victim: TargetSequence) -> None:
        """Releases the victim's KV. It keeps its tokens, and is later recomputed from what the prefix cache has
        then."""
        if victim.kv is not None:
            self._engine.kv.close(victim.kv)
            victim.kv = None
            self.stats.num_preemptions += 1

    def _recover(self, rows: Sequence[PlannedRow]) -> None:
        for row in rows:
            if row.sequence.kv is not None:
                self._engine.kv.rewind(row.sequence.kv, row.sequence.committed_len - 1)
        self._preempt(max((row.sequence for row in rows), key=lambda s: s.serial))

    def _poll_late_drafts(self, rows: Sequence[PlannedRow]) -> None:
        """Applies drafts that came during the step and continue those being verified."""
        # Only ratio mode needs this: in the others the buffer stays valid after a commit of the same tokens.
        keys = {row.sequence.key for row in rows if row.decides and row.sequence.mode is VerificationMode.RATIO}

        def wanted(event: Event) -> bool:
            if not isinstance(event, events.Offered) or event.key not in keys:
                return False
            sequence = self._sequences[event.key]
            return sequence.drafts.continued_by(event.draft, sequence.tokens)

        for event in self._take_late(wanted) if keys else ():
            self.apply(event)

    def _finish_step(self, rows: Sequence[PlannedRow], results: Sequence[Verified], started_s: float) -> None:
        committed_before = self.stats.num_committed_tokens
        # Kept here: a commit moves this object to the report, and its shares are known only after the step.
        times = [row.sequence.times for row in rows]
        for row, result in zip(rows, results, strict=True):
            row.sequence.start_step(started_s, row.num_in_step)
            try:
                self._settle(row, result)
            except Exception as error:
                if not isinstance(error, InvalidRequest):
                    log.error("a sequence failed in its step", exc_info=error, extra=row.sequence.opening.log_fields)
                    self.stats.num_step_failures += 1
                self._engine.kv.discard(kv_of(row.sequence))
                row.sequence.kv = None
                self._fail(row.sequence.key, error)
        ended_s = self._clock()
        for row in rows:
            row.sequence.ready_since_s = ended_s
            if not row.decides:
                row.sequence.times.prefill_s += ended_s - started_s
        self._report.step_us = round((ended_s - started_s) * 1e6)
        self._report.batch_sequences = len(rows)
        self._report.batch_tokens = sum(row.num_run for row in rows)
        self.stats.num_steps += 1
        self.pace.stepped(ended_s - started_s, self._report.batch_tokens)
        self._calibration.stepped()
        prompt_tokens = sum(row.num_tokens for row in rows if not row.decodes)
        took = {"rows": self._report.batch_tokens - prompt_tokens, "prompt_tokens": prompt_tokens}
        self._divide(rows, times, self._cost.shares(sequences=len(rows), seconds=ended_s - started_s, **took))
        num_committed = self.stats.num_committed_tokens - committed_before
        self._cost.took(seconds=ended_s - started_s, tokens=num_committed, **took)

    def _divide(self, rows: Sequence[PlannedRow], times: Sequence[Times], shares: StepShares) -> None:
        """Divides a step's time among its sequences."""
        for row, each in zip(rows, times, strict=True):
            prompt_tokens = 0 if row.decodes else row.num_tokens
            share_s = shares.of(prompt_tokens=prompt_tokens, rows=row.num_run - prompt_tokens)
            wasted_s, each.num_wasted_rows = each.num_wasted_rows * shares.row_s, 0
            each.share_s += share_s
            each.wasted_s += wasted_s
            self.stats.busy_s += share_s
            self.stats.wasted_s += wasted_s

    def _settle(self, row: PlannedRow, result: Verified) -> None:
        sequence = row.sequence
        if isinstance(result, Exception):
            raise result
        finish = Finish.NONE if result is None else self._commit(row, result)
        self._engine.kv.publish(kv_of(sequence), sequence.committed_len)
        if finish is not Finish.NONE:
            self._remove(sequence.key)

    def _commit(self, row: PlannedRow, verdict: Verdict) -> Finish:
        sequence, num_drafted = row.sequence, row.num_in_step
        stops, base_len = sequence.opening.stopping.stop_token_ids, sequence.committed_len
        outcome = apply_stop_conditions(verdict, num_drafted, stop_token_ids=stops, remaining=sequence.remaining)
        rejected = sequence.drafts.token_ids[outcome.num_accepted : num_drafted]
        prompt_logprobs = sequence.prompt_logprobs if sequence.wants_prompt_logprobs else []
        serial = sequence.drafts.arrivals[num_drafted - 1].serial if num_drafted else 0
        number = sibling_of(row, verdict)
        # An accepted sibling counts in place of the drafted token, which was not accepted.
        num_accepted = outcome.num_accepted - (number is not None)
        self._calibration.observe(sequence.bins[:num_drafted], outcome.num_verified, num_accepted, sequence.fit)
        self.stats.num_siblings += len(row.siblings)
        sequence.times.num_wasted_rows = max(0, row.num_drafted + len(row.siblings) - outcome.num_accepted)
        draft_useful_s = sum(arrival.draft_s for arrival in sequence.drafts.arrivals[: outcome.num_accepted])
        if number is not None:
            self._engine.kv.accept_branch(kv_of(sequence), number)
            # A stop token before it may have ended the text.
            self.stats.num_siblings_accepted += outcome.num_accepted == verdict.num_accepted
        sequence.commit(outcome.token_ids, num_drafted)
        # Before blocks are published or tokens sent: rejected tokens must not be found in the cache.
        self._engine.kv.rewind(kv_of(sequence), sequence.committed_len - 1)
        committed = Committed(
            key=sequence.key,
            base_len=base_len,
            outcome=outcome,
            rejected=rejected,
            num_dropped=sequence.drafts.take_num_dropped(),
            draft_serial=serial,
            times=sequence.take_times(),
            num_prompt_tokens=len(sequence.opening.prompt) if sequence.num_commits == 1 else 0,
            num_cached_tokens=(sequence.num_cached_tokens or 0) if sequence.num_commits == 1 else 0,
            logprobs=verdict.logprobs[: len(outcome.token_ids)],
            prompt_logprobs=prompt_logprobs,
            num_siblings=len(row.siblings),
            draft_useful_s=draft_useful_s,
        )
        self._report.commits.append(committed)
        self._count(committed)
        return outcome.finish

    def _count(self, committed: Committed) -> None:
        outcome, stats = committed.outcome, self.stats
        stats.num_draft_tokens += outcome.num_drafted
        stats.num_verified_tokens += outcome.num_verified
        stats.num_accepted_tokens += outcome.num_accepted
        stats.num_dropped_tokens += committed.num_dropped
        stats.num_committed_tokens += len(outcome.token_ids)

    def _open(self, event: events.Opened) -> None:
        key = event.key
        if key in self._sequences:
            # A later message could mean either of the two: both end.
            self._fail(key, InvalidRequest("sequence_id", "already open"))
        elif self.draining:
            self._fail(key, Unavailable("the worker is draining"))
        elif len(self._sequences) >= self._limits.max_sequences:
            self._fail(key, Overloaded(f"all {self._limits.max_sequences} sequences are taken"))
        else:
            opening = event.opening
            made = TargetSequence(key, next(self._serials), opening, self._limits.max_context_len, event.received_s)
            made.fit = self._calibration.fit(opening.tenant)
            self._sequences[key] = made

    def _offer(self, event: events.Offered | events.DraftRefused) -> None:
        sequence = self._find(event.key)
        if sequence is None:
            return
        try:
            if isinstance(event, events.DraftRefused):
                raise event.error
            sequence.offer(event.draft)
        except Exception as error:
            # A draft only affects latency: the sequence continues without it.
            self.stats.num_refused_drafts += 1
            self._report.refused_drafts.append(Failed(event.key, error))

    def _find(self, key: SequenceKey) -> TargetSequence | None:
        sequence = self._sequences.get(key)
        if sequence is None:
            self.stats.num_unknown += 1
        return sequence

    def _fail(self, key: SequenceKey, error: Exception) -> None:
        self._remove(key)
        self._report.failures.append(Failed(key, error))

    def _remove(self, key: SequenceKey) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        self._report.removed.append((key, sequence.times))
        if sequence.kv is not None:
            self._engine.kv.close(sequence.kv)
            sequence.kv = None
