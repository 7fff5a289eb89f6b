"""A target's core on our own engine: steps are planned, run and verified. Owned by one thread; knows no network.

Only it commits tokens to its sequences.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from outrider.drafting.source import DraftSource
from outrider.engine import Engine, OutOfBlocks
from outrider.engine.kv.kv_cache_manager import KVCacheManager
from outrider.engine.models.taps import HEAD_INPUT
from outrider.sequence.key import Finish
from outrider.speculation import Verdict
from outrider.target.drafts.choice import Pricing
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.by_source import tokens_by_source, verified_nodes
from outrider.target.requests.commit import apply_stop_conditions
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetStats
from outrider.target.requests.times import Timer
from outrider.target.samples import SampleRecorder
from outrider.target.step.accounting import StepAccounting
from outrider.target.step.core import Clock, KnownSequences, TargetCore
from outrider.target.step.scheduler import Batching, StepPlan, TargetRow, admissible, plan
from outrider.target.step.sequence import PromptReport, TargetSequence
from outrider.target.step.verify import kv_of, verify_rows
from outrider.worker.events import Load, Opened, SequenceKey
from outrider.worker.faults import check_engine
from outrider.worker.step_cost import StepCost
from outrider.worker.watchdog import MIN_ON_GPU_S, MIN_S, StepPace

log = logging.getLogger(__name__)

_NO_PROMPT = PromptReport()


class TargetWorker(TargetCore[TargetSequence]):
    """Sequences and the engine that runs them."""

    _sequences: OpenSequences

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        batching: Batching,
        clock: Clock,
        row_price: Callable[[StepCost], float] = lambda cost: cost.price,
        sources: Sequence[DraftSource] = (),
        samples: SampleRecorder | None = None,
    ) -> None:
        """`row_price`: the least chance at which a drafted token is verified, as a function of measured step costs.
        `sources`: those of drafts that are made in this process. `samples`: None where nothing may be recorded."""
        stats = TargetStats()
        pace = StepPace(batching.max_batch_tokens, MIN_S if engine.info.device == "cpu" else MIN_ON_GPU_S)
        super().__init__(
            OpenSequences(engine.kv, stats), StepAccounting(stats, row_price), limits, pace, clock, sources, samples
        )
        self._taps = () if self._drafts.taps is None else self._drafts.taps or (HEAD_INPUT,)
        """The layers whose states a step has to give."""
        self._engine = engine
        self._batching = batching

    @property
    def load(self) -> Load:
        known, cost = self._sequences, self._accounting.cost
        running, free = known.num_running, self._engine.kv.num_free_blocks
        times_ns = round(cost.prompt_token_s * 1e9), round(cost.row_s * 1e9)
        return Load(running, len(known) - running, free, len(known), self.draining, *times_ns)

    def _prefix_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._engine.kv.take_prefix_changes()

    def _drop_prefixes(self) -> None:
        self._engine.kv.drop_prefixes()

    def _start(self, event: Opened, drafts: SequenceDrafts) -> None:
        self._sequences.add(event, self._limits.max_context_len, drafts)

    def step(self) -> float | None:
        """Runs one engine step.

        Returns when to call again if no event comes before: 0 for at once, None for never, else monotonic seconds.
        """
        started_s = self._clock()
        self._drafts.poll()
        drafting_s = self._clock() - started_s
        planned = self._schedule(started_s)
        for sequence, until_s in planned.held:
            sequence.timer.held_until_s = until_s
        if not planned.rows:
            return planned.wake_at_s
        try:
            verify_rows(self._engine, planned.rows, self._taps)
        except OutOfBlocks as error:
            # The plan and the pool disagree. Preempting the newest sequence is always safe.
            log.error("planned a step that does not fit: %s", error)
            self._recover(planned.rows)
            return 0.0
        if all(row.raised for row in planned.rows):
            check_engine(self._engine.check)
        self._finish_step(planned.rows, started_s, drafting_s)
        return 0.0

    def _schedule(self, now_s: float) -> StepPlan:
        self._sequences.admit(self._batching)
        engine = self._engine
        pricing = Pricing(self._accounting.row_price, self._accounting.calibration, engine.num_free_tokens)
        while True:
            planned = plan(list(self._sequences), self._batching, engine.kv.num_free_blocks, now_s, pricing)
            if planned.victim is None:
                return planned
            self._sequences.preempt(planned.victim)

    def _recover(self, rows: Sequence[TargetRow]) -> None:
        for row in rows:
            if row.sequence.kv is not None:
                self._engine.kv.rewind(row.sequence.kv, row.sequence.committed_len - 1)
        self._sequences.preempt(max((row.sequence for row in rows), key=lambda s: s.serial))

    def _finish_step(self, rows: Sequence[TargetRow], started_s: float, drafting_s: float) -> None:
        for row in rows:
            sequence = row.sequence
            sequence.timer.step_began(started_s)
            try:
                self._settle(row)
            except Exception as error:
                self._engine.kv.discard(kv_of(sequence))
                sequence.kv = None
                self._failed(sequence.key, sequence, error, "in its step")
        # Longer drafts take longer to make: with that time a row would seem to cost what its token did.
        self._accounting.took(rows, self._report_step(rows, started_s) - drafting_s)

    def _settle(self, row: TargetRow) -> None:
        sequence = row.sequence
        if row.error is not None:
            raise row.error
        if row.verdict is not None:
            self._commit(row, row.verdict)
        elif not row.decides:
            # A chunk of prefill; the cache holds its tokens by now.
            self._take_states(row)
        self._engine.kv.publish(kv_of(sequence), sequence.committed_len)
        if row.finish is not Finish.NONE:
            self._remove(sequence.key)

    def _commit(self, row: TargetRow, verdict: Verdict) -> None:
        sequence, draft, opening = row.sequence, row.draft, row.sequence.opening
        stops = opening.stop_token_ids
        apply_stop_conditions(row, verdict, stop_token_ids=stops, remaining=sequence.remaining)
        verified = verified_nodes(draft, row.accepted, row.num_verified)
        self._accounting.verified(row, sequence.drafts.fit, verified)
        # Before blocks are published or tokens sent: rejected tokens must not be found in the cache, and the last
        # committed one is not in it yet.
        self._engine.kv.keep(kv_of(sequence), row.accepted[: len(row.token_ids) - 1])
        self._take_states(row)
        prompt = sequence.prompt_report or _NO_PROMPT
        sequence.commit(row.token_ids)
        self._drafts.commit(row)
        row.times = sequence.timer.take()
        row.num_prompt_tokens, row.num_cached_tokens = prompt.num_tokens, prompt.num_cached_tokens or 0
        row.prompt_logprobs, row.top = prompt.logprobs, verdict.logprobs[: len(row.token_ids)]
        row.logprobs = opening.asked_logprobs(row.top)
        row.sources = tokens_by_source(draft, row.accepted, verified)
        self._report.commits.append(row)
        self._accounting.committed(row)

    def _take_states(self, row: TargetRow) -> None:
        if row.states is None:
            return
        nodes = [row.num_tokens + node for node in row.accepted]
        states, row.states = row.states[[*range(row.num_tokens), *nodes]], None
        self._see(row, row.start, states)


class OpenSequences(KnownSequences[TargetSequence]):
    """The sequences that our own engine runs."""

    def __init__(self, kv: KVCacheManager, stats: TargetStats) -> None:
        super().__init__(stats)
        self._kv = kv
        self._serials = itertools.count()

    @property
    def num_running(self) -> int:
        """Sequences that have KV."""
        return sum(1 for sequence in self if sequence.kv is not None)

    def add(self, event: Opened, max_context_len: int, drafts: SequenceDrafts) -> None:
        timer = Timer(event.received_s)
        self._open[event.key] = TargetSequence(
            event.key, next(self._serials), event.opening, max_context_len, timer, drafts
        )

    def admit(self, batching: Batching) -> None:
        """Gives KV to those that wait for it, as far as all that have it can finish their prefill."""
        for sequence in admissible(list(self), batching, self._kv.num_free_blocks):
            # Cached tokens have no logits, so the prefix cache is not used.
            cached = () if sequence.wants_prompt_logprobs else sequence.tokens
            sequence.kv = self._kv.open(cached, sequence.opening.salt)
            report = sequence.prompt_report
            if report is not None and report.num_cached_tokens is None:
                report.num_cached_tokens = min(sequence.cached_len, len(sequence.opening.prompt))

    def preempt(self, victim: TargetSequence) -> None:
        """Releases the victim's KV. It keeps its tokens, and is later recomputed from what the prefix cache has
        then."""
        if victim.kv is not None:
            self._release(victim)
            self._stats.num_preemptions += 1

    def remove(self, key: SequenceKey) -> TargetSequence | None:
        """Forgets the sequence and releases its KV. None when it is not open."""
        sequence = self._open.pop(key, None)
        if sequence is not None:
            self._release(sequence)
        return sequence

    def _release(self, sequence: TargetSequence) -> None:
        if sequence.kv is not None:
            self._kv.close(sequence.kv)
            sequence.kv = None
