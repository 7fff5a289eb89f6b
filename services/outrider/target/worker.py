"""The target worker's core: events in, steps run, reports out. Owned by one thread; knows no network.

Only it commits tokens to its sequences. A fault in one sequence ends that sequence, with an error that names the
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import assert_never

from outrider.drafting.source import DraftSource
from outrider.engine import Engine, OutOfBlocks
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.protocol.finish import Finish
from outrider.speculation import Verdict
from outrider.target import events
from outrider.target.accounting import StepAccounting
from outrider.target.by_source import judged, tokens_by_source
from outrider.target.calibration import Fit
from outrider.target.choice import Pricing
from outrider.target.commit import apply_stop_conditions
from outrider.target.events import Event
from outrider.target.opening import Limits
from outrider.target.own_drafts import OwnDrafts
from outrider.target.report import Committed, Report, TargetStats
from outrider.target.scheduler import Batching, Plan, PlannedRow, plan
from outrider.target.sequence import PromptReport
from outrider.target.sequences import OpenSequences
from outrider.target.verify import Verified, kv_of, verify_rows
from outrider.worker.events import Closed, DrainExpired, DrainStarted, Refused, SequenceKey, StreamEnded
from outrider.worker.faults import check_engine
from outrider.worker.report import Failed, Load
from outrider.worker.step_cost import StepCost
from outrider.worker.watchdog import MIN_ON_GPU_S, MIN_S, StepPace

log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic seconds."""


class TargetWorker:
    """Sequences and the engine that runs them."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        batching: Batching,
        clock: Clock,
        row_price: Callable[[StepCost], float] = lambda cost: cost.price,
        sources: Sequence[DraftSource] = (),
    ) -> None:
        """`row_price`: the least chance at which a drafted token is verified, as a function of measured step costs.
        `sources`: those of drafts that are made in this process."""
        self.stats = TargetStats()
        self.pace = StepPace(batching.max_batch_tokens, MIN_S if engine.info.device == "cpu" else MIN_ON_GPU_S)
        self.draining = False
        self._engine = engine
        self._limits = limits
        self._batching = batching
        self._clock = clock
        self._own_drafts = OwnDrafts(sources, self.stats, clock)
        self._sequences = OpenSequences(engine.kv, self.stats)
        self._accounting = StepAccounting(self.stats, row_price)
        self._report = Report()

    @property
    def load(self) -> Load:
        known, cost = self._sequences, self._accounting.cost
        running, free = known.num_running, self._engine.kv.num_free_blocks
        times_ns = round(cost.prompt_token_s * 1e9), round(cost.row_s * 1e9)
        return Load(running, len(known) - running, free, len(known), self.draining, *times_ns)

    def take_report(self) -> Report:
        """What happened since the last call. May be empty."""
        report, self._report = self._report, Report()
        report.row_price = self._accounting.row_price
        report.best_chance = self._accounting.calibration.best(Fit())
        report.prefix_added, report.prefix_removed = self._engine.kv.take_prefix_changes()
        return report

    def apply(self, event: Event) -> None:
        """Applies one event; a fault in it ends its sequence and is reported."""
        match event:
            case events.Opened():
                self._open(event)
            case events.Compiled():
                if sequence := self._sequences.find(event.key):
                    sequence.take_grammar(event.grammar)
            case events.GrammarWork():
                if event.key in self._sequences and (sequence := self._sequences.find(event.key)):
                    sequence.grammar_worked(event.seconds)
            case events.Offered() | events.DraftRefused():
                self._offer(event)
            case events.Adjusted():
                if sequence := self._sequences.find(event.key):
                    sequence.adjust(event.speculation)
                    self._own_drafts.limit(event.key, event.speculation)
            case events.Erased():
                event.done(self._own_drafts.erase(event.tenant))
            case Closed():
                if self._sequences.find(event.key):
                    self._remove(event.key)
            case StreamEnded():
                for key in [k for k in self._sequences.keys if k.stream == event.stream]:
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
        self._own_drafts.offer(self._sequences.put)
        planned = self._schedule(started_s)
        for sequence, until_s in planned.held:
            sequence.timer.held_until_s = until_s
        if not planned.rows:
            return planned.wake_at_s
        try:
            results = verify_rows(self._engine, planned.rows, self._own_drafts.taps)
        except OutOfBlocks as error:
            # The plan and the pool disagree. Preempting the newest sequence is always safe.
            log.error("planned a step that does not fit: %s", error)
            self._recover(planned.rows)
            return 0.0
        if all(result.raised for result in results):
            check_engine(self._engine.check)
        self._finish_step(results, started_s)
        return 0.0

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        for key in self._sequences.keys:
            self._fail(key, error)

    def _schedule(self, now_s: float) -> Plan:
        self._sequences.admit(self._batching)
        engine = self._engine
        pricing = Pricing(self._accounting.row_price, self._accounting.calibration, engine.num_free_tokens)
        while True:
            planned = plan(list(self._sequences), self._batching, engine.kv.num_free_blocks, now_s, pricing)
            if planned.victim is None:
                return planned
            self._sequences.preempt(planned.victim)

    def _recover(self, rows: Sequence[PlannedRow]) -> None:
        for row in rows:
            if row.sequence.kv is not None:
                self._engine.kv.rewind(row.sequence.kv, row.sequence.committed_len - 1)
        self._sequences.preempt(max((row.sequence for row in rows), key=lambda s: s.serial))

    def _finish_step(self, results: Sequence[Verified], started_s: float) -> None:
        rows = [result.row for result in results]
        # Kept here: a commit moves this object to the report, and its shares are known only after the step.
        times = [row.sequence.timer.times for row in rows]
        for row, result in zip(rows, results, strict=True):
            row.sequence.timer.step_began(started_s)
            try:
                self._settle(result)
            except Exception as error:
                if not isinstance(error, InvalidRequest):
                    log.error("a sequence failed in its step", exc_info=error, extra=row.sequence.opening.log_fields)
                    self.stats.num_step_failures += 1
                self._engine.kv.discard(kv_of(row.sequence))
                row.sequence.kv = None
                self._fail(row.sequence.key, error)
        ended_s = self._clock()
        for row in rows:
            row.sequence.timer.step_ended(started_s, ended_s, decides=row.decides)
        step_s, num_tokens = ended_s - started_s, sum(row.num_run for row in rows)
        self._report.step_us = round(step_s * 1e6)
        self._report.batch_sequences = len(rows)
        self._report.batch_tokens = num_tokens
        self.pace.stepped(step_s, num_tokens)
        self._accounting.stepped(rows, times, step_s)

    def _settle(self, result: Verified) -> None:
        sequence, found = result.row.sequence, result.found
        if isinstance(found, Exception):
            raise found
        if found is None and not result.row.decides:
            # A chunk of prefill; the cache holds its tokens by now.
            start = kv_of(sequence).cached_len - result.row.num_tokens
            self._own_drafts.see(sequence.key, start, result.committed_states(0))
        finish = Finish.NONE if found is None else self._commit(result, found)
        self._engine.kv.publish(kv_of(sequence), sequence.committed_len)
        if finish is not Finish.NONE:
            self._remove(sequence.key)

    def _commit(self, result: Verified, verdict: Verdict) -> Finish:
        sequence, draft = result.row.sequence, result.row.draft
        stops, base_len = sequence.opening.stopping.stop_token_ids, sequence.committed_len
        outcome = apply_stop_conditions(verdict, draft.depth, stop_token_ids=stops, remaining=sequence.remaining)
        prompt, path = sequence.prompt_report or PromptReport(), result.path
        accepted = path[: outcome.num_accepted]
        verified = judged(draft, accepted, outcome.num_verified)
        sources, token_sources = tokens_by_source(draft, accepted, verified)
        self._accounting.verified(result.row, outcome, accepted, verified)
        self._engine.kv.keep(kv_of(sequence), path)
        self._own_drafts.see(
            sequence.key, base_len - result.row.num_tokens, result.committed_states(outcome.num_accepted)
        )
        sequence.commit(outcome.token_ids, draft.depth)
        self._own_drafts.commit(sequence.key, base_len, outcome.token_ids)
        # Before blocks are published or tokens sent: rejected tokens must not be found in the cache.
        self._engine.kv.rewind(kv_of(sequence), sequence.committed_len - 1)
        committed = Committed(
            key=sequence.key,
            base_len=base_len,
            outcome=outcome,
            rejected=[draft.token_ids[node] for node in draft.longest()[outcome.num_accepted :]],
            num_dropped=sequence.drafts.take_num_dropped(),
            draft_serial=max(origin.serial for origin in draft.origins or (draft,)),
            times=sequence.timer.take(),
            num_prompt_tokens=prompt.num_tokens,
            num_cached_tokens=prompt.num_cached_tokens or 0,
            logprobs=verdict.logprobs[: len(outcome.token_ids)],
            prompt_logprobs=prompt.logprobs,
            num_branch_tokens=len(draft) - draft.depth,
            draft_useful_s=sum(map(draft.seconds_of, accepted)),
            sources=sources,
            token_sources=token_sources,
        )
        self._report.commits.append(committed)
        self._accounting.committed(committed)
        return outcome.finish

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
            made = self._sequences.add(key, event.opening, self._limits.max_context_len, event.received_s)
            made.fit = self._accounting.calibration.fit(event.opening.tenant)
            self._own_drafts.open(key, event.opening)

    def _offer(self, event: events.Offered | events.DraftRefused) -> None:
        sequence = self._sequences.find(event.key)
        if sequence is None:
            return
        try:
            if isinstance(event, events.DraftRefused):
                raise event.error
            sequence.offer(event.tree, event.received_s)
        except Exception as error:
            # A draft only affects latency: the sequence continues without it.
            self.stats.num_refused_drafts += 1
            self._report.refused_drafts.append(Failed(event.key, error))

    def _fail(self, key: SequenceKey, error: Exception) -> None:
        self._remove(key)
        self._report.failures.append(Failed(key, error))

    def _remove(self, key: SequenceKey) -> None:
        sequence = self._sequences.remove(key)
        self._own_drafts.close(key)
        if sequence is not None:
            # After the steps' shares, which a router bounds by the time of the steps.
            sequence.timer.times.share_s += sequence.grammar_s
            self.stats.busy_s += sequence.grammar_s
            self._report.removed.append((key, sequence.timer.times))
