"""A target's core on vLLM: events in, vLLM's steps run, reports out. Owned by one thread; knows no network.

vLLM schedules, runs, samples and stops; here its results become commits. A fault of vLLM itself ends every sequence, so
that routers continue them elsewhere, and this worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from outrider.drafting.source import DraftSource
from outrider.drafting.tree import DraftTree
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.speculation import Grammar
from outrider.target import events
from outrider.target.by_source import tokens_by_source
from outrider.target.calibration import Fit
from outrider.target.commit import Outcome
from outrider.target.events import Event
from outrider.target.opening import Limits
from outrider.target.own_drafts import OwnDrafts
from outrider.target.report import Committed, Report, TargetStats
from outrider.target.times import Timer, Times
from outrider.vllm.drafts import Judged
from outrider.vllm.grammar import MaskedGrammar
from outrider.vllm.opening import check_supported, request_of
from outrider.vllm.sequence import FINISHES, VllmSequence
from outrider.worker.events import Closed, DrainExpired, DrainStarted, Refused, SequenceKey, StreamEnded
from outrider.worker.report import Failed, Load
from outrider.worker.watchdog import MIN_ON_GPU_S, MIN_S, StepPace

log = logging.getLogger(__name__)

_PAUSE_S = 0.005
"""After a step in which vLLM could run nothing."""


class VllmMachine:
    """Sequences and the vLLM engine that runs them."""

    def __init__(
        self,
        core: EngineCore,
        limits: Limits,
        clock: Callable[[], float],
        on_broken: Callable[[], None] = lambda: None,
        sources: Sequence[DraftSource] = (),
    ) -> None:
        """`on_broken` is called when vLLM's engine has failed: it cannot be used again. `sources`: those of drafts that
        are made in this process."""
        scheduler = core.scheduler
        self.stats = TargetStats()
        least_s = MIN_S if core.vllm_config.device_config.device_type == "cpu" else MIN_ON_GPU_S
        self.pace = StepPace(scheduler.max_num_scheduled_tokens, least_s)
        self.draining = False
        self.scheduler_stats: Any = None
        """vLLM's own, of the last step that had any."""
        self._core = core
        self._scheduler = scheduler
        self._book = scheduler.book
        self._limits = limits
        self._clock = clock
        self._on_broken = on_broken
        self._own_drafts = OwnDrafts(sources, self.stats, clock)
        self._open: dict[SequenceKey, VllmSequence] = {}
        self._by_request: dict[str, VllmSequence] = {}
        self._report = Report()

    @property
    def load(self) -> Load:
        running, cost = len(self._scheduler.running), self._book.cost
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        times_ns = round(cost.prompt_token_s * 1e9), round(cost.row_s * 1e9)
        return Load(running, max(0, len(self._open) - running), free, len(self._open), self.draining, *times_ns)

    def take_report(self) -> Report:
        """What happened since the last call. May be empty."""
        report, self._report = self._report, Report()
        report.row_price = self._book.row_price
        report.best_chance = self._book.calibration.best(Fit())
        report.prefix_added, report.prefix_removed = self._scheduler.kv_event_publisher.take()
        return report

    def apply(self, event: Event) -> None:
        """Applies one event; a fault in it ends its sequence and is reported."""
        match event:
            case events.Opened():
                self._open_one(event)
            case events.Compiled():
                if (sequence := self._find(event.key)) is not None:
                    self._begin(sequence, event.grammar)
            case events.GrammarWork():
                if event.key in self._open:
                    self._open[event.key].grammar_s += event.seconds
            case events.Offered() | events.DraftRefused():
                self._offer(event)
            case events.Adjusted():
                if (sequence := self._find(event.key)) is not None:
                    sequence.speculation = event.speculation
                    self._book.adjust(sequence.request_id, event.speculation)
                    self._own_drafts.limit(event.key, event.speculation)
            case Closed():
                if self._find(event.key) is not None:
                    self._remove(event.key)
            case events.Erased():
                event.done(self._own_drafts.erase(event.tenant))
            case StreamEnded():
                for key in [key for key in self._open if key.stream == event.stream]:
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
        """Runs one step of vLLM. Returns as `StepMachine.step`. Raises Unavailable when vLLM's engine has failed."""
        started_s = self._clock()
        self._own_drafts.offer(self._put)
        if (until_s := self._held_until(started_s)) is not None:
            return until_s
        if not self._scheduler.has_requests():
            return None
        try:
            outputs, ran = self._core.step()
            self._core.post_step(ran)
        except Exception as error:
            self._on_broken()
            raise Unavailable(f"vLLM's engine failed: {type(error).__name__}") from error
        if not ran:
            return self._clock() + _PAUSE_S if self._scheduler.has_requests() else None
        self._finish_step(outputs, started_s)
        return 0.0

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        for key in list(self._open):
            self._fail(key, error)

    # -- waiting for drafts

    def _held_until(self, now_s: float) -> float | None:
        """Until when all sequences wait for a draft; None when one of them is ready. vLLM steps all or none."""
        if len(self._by_request) != len(self._scheduler.running) or not self._by_request:
            return None
        found = [(sequence, self._waits_until(sequence, now_s)) for sequence in self._by_request.values()]
        if any(until_s is None for _, until_s in found):
            return None
        for sequence, until_s in found:
            sequence.timer.held_until_s = until_s
        return min(until_s for _, until_s in found if until_s is not None)

    def _waits_until(self, sequence: VllmSequence, now_s: float) -> float | None:
        drafted = self._book.find(sequence.request_id)
        if drafted is None or not drafted.buffer.active or drafted.buffer.has_answer(sequence.committed_len):
            return None
        if not sequence.decoding or sequence.request.max_tokens - sequence.request.num_output_tokens <= 1:
            return None
        _, looked_up = drafted.best_path(self._book.calibration, 1)
        worth = sequence.speculation.weight * self._book.calibration.best(drafted.fit)
        if worth < self._book.row_price or worth <= max(looked_up, default=0.0):
            return None
        until_s = sequence.timer.ready_since_s + sequence.speculation.max_wait_us * 1e-6
        return until_s if until_s > now_s else None

    # -- results of a step

    def _finish_step(self, outputs: Mapping[int, Any], started_s: float) -> None:
        facts = self._scheduler.step
        stepped = [one for name in facts.counts if (one := self._by_request.get(name)) is not None]
        # Kept here: a commit moves this object to the report, and its shares are known only after the step.
        times = [sequence.timer.times for sequence in stepped]
        decided: set[str] = set()
        for sequence in stepped:
            sequence.timer.step_began(started_s)
        for group in outputs.values():
            self.scheduler_stats = group.scheduler_stats or self.scheduler_stats
            for output in group.outputs:
                if (found := self._by_request.get(output.request_id)) is not None:
                    decided.add(output.request_id)
                    self._settle(found, output)
        ended_s = self._clock()
        for sequence in stepped:
            sequence.timer.step_ended(started_s, ended_s, decides=sequence.request_id in decided)
        self._report.step_us = round((ended_s - started_s) * 1e6)
        self._report.batch_sequences = len(stepped)
        self._report.batch_tokens = facts.num_tokens
        self.pace.stepped(ended_s - started_s, facts.num_tokens)
        self._divide(stepped, times, ended_s - started_s)
        self.stats.num_steps += 1
        self.stats.num_preemptions = self._scheduler.num_preemptions

    def _settle(self, sequence: VllmSequence, output: Any) -> None:
        try:
            if sequence.grammar is not None and sequence.grammar.error is not None:
                raise sequence.grammar.error
            if output.finish_reason not in FINISHES:
                raise Unavailable(f"vLLM ended the request: {output.finish_reason}")
            self._commit(sequence, output)
        except Exception as error:
            if not isinstance(error, InvalidRequest):
                log.error("a sequence failed in its step", exc_info=error, extra=sequence.opening.log_fields)
                self.stats.num_step_failures += 1
            self._fail(sequence.key, error)
            return
        if output.finish_reason is not None:
            self._remove(sequence.key)

    def _commit(self, sequence: VllmSequence, output: Any) -> None:
        judged: Judged = self._scheduler.judged.get(output.request_id, Judged())
        token_ids, base_len = list(output.new_token_ids), sequence.committed_len
        finish, first = FINISHES[output.finish_reason], not sequence.answered
        if sequence.grammar is not None:
            sequence.grammar.settle()
        sequence.committed_len += len(token_ids)
        sequence.answered = True
        self._own_drafts.commit(sequence.key, base_len, token_ids)
        num_drafted, num_verified, num_accepted = len(judged.draft), judged.num_verified, judged.num_accepted
        sequence.timer.times.num_wasted_rows = num_drafted - num_accepted
        sources, token_sources = tokens_by_source(judged.draft, range(num_accepted), judged.verified)
        committed = Committed(
            key=sequence.key,
            base_len=base_len,
            outcome=Outcome(token_ids, num_drafted, num_verified, num_accepted, finish),
            rejected=judged.rejected,
            num_dropped=judged.num_dropped,
            draft_serial=judged.draft_serial,
            times=sequence.timer.take(),
            num_prompt_tokens=len(sequence.opening.prompt) if first else 0,
            num_cached_tokens=_num_cached(output, len(sequence.opening.prompt)),
            logprobs=sequence.logprobs(output.new_logprobs),
            prompt_logprobs=sequence.prompt_logprobs(output.new_prompt_logprobs_tensors),
            draft_useful_s=judged.draft_useful_s,
            sources=sources,
            token_sources=token_sources,
        )
        self._report.commits.append(committed)
        self._count(committed)

    def _count(self, committed: Committed) -> None:
        outcome, stats = committed.outcome, self.stats
        stats.num_draft_tokens += outcome.num_drafted
        stats.num_verified_tokens += outcome.num_verified
        stats.num_accepted_tokens += outcome.num_accepted
        stats.num_dropped_tokens += committed.num_dropped
        stats.num_committed_tokens += len(outcome.token_ids)
        for counted in committed.sources:
            stats.of_source(counted.source).add(counted)

    def _divide(self, stepped: Sequence[VllmSequence], times: Sequence[Times], seconds: float) -> None:
        """Divides a step's time among its sequences."""
        facts = self._scheduler.step
        rows = facts.num_rows
        shares = self._book.cost.shares(
            sequences=len(stepped), rows=rows, prompt_tokens=facts.num_tokens - rows, seconds=seconds
        )
        for sequence, each in zip(stepped, times, strict=True):
            count, decodes = facts.counts[sequence.request_id], facts.decodes(sequence.request_id)
            share_s = shares.of(prompt_tokens=0 if decodes else count, rows=count if decodes else 0)
            wasted_s, each.num_wasted_rows = each.num_wasted_rows * shares.row_s, 0
            each.share_s += share_s
            each.wasted_s += wasted_s
            self.stats.busy_s += share_s
            self.stats.wasted_s += wasted_s

    # -- opening and closing

    def _open_one(self, event: events.Opened) -> None:
        key = event.key
        if key in self._open:
            # A later message could mean either of the two: both end.
            self._fail(key, InvalidRequest("sequence_id", "already open"))
        elif self.draining:
            self._fail(key, Unavailable("the worker is draining"))
        elif len(self._open) >= self._limits.max_sequences:
            self._fail(key, Overloaded(f"all {self._limits.max_sequences} sequences are taken"))
        else:
            sequence = self._open[key] = VllmSequence(key, event.opening, Timer(event.received_s))
            self._own_drafts.open(key, event.opening)
            self._guarded(sequence, lambda: check_supported(event.opening))
            if key in self._open and not event.opening.compiling:
                self._begin(sequence, None)

    def _begin(self, sequence: VllmSequence, grammar: Grammar | None) -> None:
        """From here on vLLM runs it."""
        self._guarded(sequence, lambda: self._add(sequence, grammar))

    def _add(self, sequence: VllmSequence, grammar: Grammar | None) -> None:
        opening = sequence.opening
        made = request_of(sequence.request_id, opening, self._limits)
        sequence.request = Request.from_engine_core_request(made, self._core.request_block_hasher)
        possible: dict[str, Any] = {}
        if grammar is not None:
            sequence.grammar = MaskedGrammar(grammar)
            sequence.request.structured_output_request.grammar = sequence.grammar
            possible = {"num_possible": sequence.grammar.num_possible}
        self._core.add_request(sequence.request)
        self._by_request[sequence.request_id] = sequence
        tokens = sequence.request.all_token_ids
        self._book.open(sequence.request_id, tokens, sequence.speculation, opening.tenant, **possible)

    def _guarded(self, sequence: VllmSequence, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not isinstance(error, InvalidRequest):
                log.error("a sequence could not be opened", exc_info=error, extra=sequence.opening.log_fields)
            self._fail(sequence.key, error)

    def _offer(self, event: events.Offered | events.DraftRefused) -> None:
        if (sequence := self._find(event.key)) is None:
            return
        try:
            if isinstance(event, events.DraftRefused):
                raise event.error
            self._book.offer(sequence.request_id, event.tree)
        except Exception as error:
            # A draft only affects latency: the sequence continues without it.
            self.stats.num_refused_drafts += 1
            self._report.refused_drafts.append(Failed(event.key, error))
            return
        drafted = self._book.find(sequence.request_id)
        if drafted is not None and drafted.buffer.has_answer(sequence.committed_len):
            sequence.timer.draft_answered(event.received_s)

    def _put(self, key: SequenceKey, tree: DraftTree) -> None:
        if (sequence := self._open.get(key)) is not None:
            self._book.put(sequence.request_id, tree)

    def _find(self, key: SequenceKey) -> VllmSequence | None:
        """None, which is counted, when it is not open: a message about it came late, or it was never opened."""
        sequence = self._open.get(key)
        if sequence is None:
            self.stats.num_unknown += 1
        return sequence

    def _fail(self, key: SequenceKey, error: Exception) -> None:
        self._remove(key)
        self._report.failures.append(Failed(key, error))

    def _remove(self, key: SequenceKey) -> None:
        if (sequence := self._open.pop(key, None)) is None:
            return
        self._by_request.pop(sequence.request_id, None)
        self._book.close(sequence.request_id)
        self._own_drafts.close(key)
        # Nothing happens when vLLM has ended it already.
        self._core.abort_requests([sequence.request_id])
        # After the steps' shares, which a router bounds by the time of the steps.
        sequence.timer.times.share_s += sequence.grammar_s
        self.stats.busy_s += sequence.grammar_s
        self._report.removed.append((key, sequence.timer.times))


def _num_cached(output: Any, prompt_len: int) -> int:
    """Prompt tokens found in the prefix cache; 0 after the first commit."""
    found = output.prefill_stats
    return 0 if found is None else min(found.num_cached_tokens, prompt_len)
