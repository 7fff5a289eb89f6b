"""One target, its drafts and a router in virtual time: the shipped workers, policy and plan, on texts that are known.

Each stream sends its next request when the last one has ended. Every worker has a device of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from outrider.draft import events as draft_events
from outrider.draft.events import Proposed
from outrider.drafters import ModelConfig, ModelDrafter
from outrider.drafting.source import DraftSource
from outrider.engine import ModelInfo
from outrider.limits import MAX_DRAFT_TOKENS, to_us
from outrider.protocol.rounds import Round
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2, worker_pb2
from outrider.sequence.key import Finish
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation, price_moved
from outrider.sim.engine import Guess, KnownEngine, Says, StepSeconds
from outrider.sim.stack import VirtualDraft, fail, limits_of, run_until, simulate, target_worker
from outrider.sim.worker import Processor, VirtualSteps
from outrider.speculation import SamplingParams, VerificationMode
from outrider.target.requests.events import Adjusted, Offered
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.worker.events import Closed, Opened, SequenceKey

from outrider_controller.autoscaler.evidence import own_drafts_of
from outrider_controller.autoscaler.plan import PLAN_EVERY_S, TargetState
from outrider_controller.plan_messages import draft_version
from outrider_controller.router import tuning
from outrider_controller.router.config import PolicyConfig
from outrider_controller.router.request.checks import Request
from outrider_controller.router.speculation.controller import SpeculationController
from outrider_controller.router.speculation.policy import Policy
from outrider_controller.whatif.texts import Text, Texts, draft_says, target_says

_MODEL = "target"
_DRAFT = worker_pb2.WorkerInfo(model="draft", model_revision="replayed", draft_kind="model")
_GREEDY = SamplingParams(temperature=0.0)
_BLOCK_SIZE, _NUM_BLOCKS, _MAX_CONTEXT, _MAX_SEQUENCES = 16, 1 << 17, 1 << 15, 4096


@dataclass(frozen=True, slots=True)
class Times:
    """What takes how long, in seconds."""

    target: StepSeconds
    draft: StepSeconds
    """A forward of the draft."""
    one_way_s: float = 0.0005
    """A message from the target to a draft, or back."""
    between_steps_s: float = 0.0
    """Between two steps of the target."""
    between_s: float = 0.002
    """From the end of a stream's request to the opening of its next one at the target."""
    num_free: Callable[[int, int], int] = lambda rows, tokens: 0
    """(sequences, tokens) of a target's step → how many more tokens it would run in the same time."""


@dataclass(frozen=True, slots=True)
class Setup:
    times: Times
    streams: int = 1
    drafts: int = 1
    """Draft workers of the target; 0: it drafts by its own sources alone."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    cap: int | None = None
    """What clients ask for as most drafted tokens per step."""
    drafting: ModelConfig = field(default_factory=ModelConfig)
    mode: str = "auto"
    priced: bool = True
    """Whether a drafted token has to be worth its row."""
    sources: Callable[[Texts], Sequence[DraftSource]] = lambda texts: ()
    """Those of the target's own process."""
    max_batch_tokens: int = 512


@dataclass(slots=True)
class RunResult:
    """What came of a run, without its beginning."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    verified: int = 0
    accepted: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Of each commit after a request's first: seconds since the last one, and its tokens."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def per_token_s(self, share: float) -> float:
        """A quantile of the time per token, each token counted once."""
        each = sorted((gap / count, count) for gap, count in self.gaps)
        left = share * sum(count for _, count in each)
        for seconds, count in each:
            left -= count
            if left <= 0:
                return seconds
        return each[-1][0] if each else 0.0


@dataclass(slots=True)
class _Stream:
    key: SequenceKey
    request: Request
    controller: SpeculationController
    spec: SequenceSpec
    draft: VirtualDraft | None
    committed_s: float = -1.0
    """The last commit; negative before the first."""
    asked: dict[int, float] = field(default_factory=dict)
    """Committed length → when the draft was sent it."""
    serial: int = 0
    active: bool = False
    answer_us: int = 0
    rounds: int = 0


class VirtualStack:
    _loop: asyncio.AbstractEventLoop
    _target: VirtualSteps
    _drafts: list[VirtualDraft]

    def __init__(self, texts: Texts, setup: Setup, seed: int = 0) -> None:
        self._texts, self._setup = texts, setup
        self._policy = Policy(setup.policy)
        self._keys = itertools.count(1)
        self._order = self._numbers(random.Random(seed))
        self._streams: dict[SequenceKey, _Stream] = {}
        self._price, self._sent_price, self._best_chance = 0.0, 0.0, 1.0
        self._measuring, self._ran = False, RunResult()

    def run(self, seconds: float, settle_s: float) -> RunResult:
        """`settle_s`: of the time that is not counted, before it."""
        # Each tensor is tiny: more threads would only wait for one another.
        torch.set_num_threads(1)
        simulate(self._run(seconds, settle_s))
        self._ran.seconds = seconds
        return self._ran

    async def _run(self, seconds: float, settle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._target = self._target_steps()
        self._drafts = [self._draft() for _ in range(self._setup.drafts)]
        for number in range(self._setup.streams):
            # Not all at once: their prompts would be read in one step, again and again.
            self._loop.call_later(0.01 * number, self._begin)
        self._loop.call_later(PLAN_EVERY_S, self._plan)
        await run_until(self._counted(seconds, settle_s), [self._target, *(draft.steps for draft in self._drafts)])

    async def _counted(self, seconds: float, settle_s: float) -> None:
        await asyncio.sleep(settle_s)
        self._measuring = True
        await asyncio.sleep(seconds)
        self._measuring = False

    def _numbers(self, chance: random.Random) -> Iterator[int]:
        while True:
            numbers = list(range(len(self._texts.texts)))
            chance.shuffle(numbers)
            yield from numbers

    # -- workers

    def _target_steps(self) -> VirtualSteps:
        setup, info = self._setup, self._info
        processor = Processor(self._loop.time, setup.times.between_steps_s)
        engine = KnownEngine(
            info, self._says(target_says), setup.times.target, processor, num_free=setup.times.num_free
        )
        worker = target_worker(
            *(engine, limits_of(info, _MAX_SEQUENCES), processor.clock, setup.sources(self._texts)),
            max_batch_tokens=setup.max_batch_tokens,
            row_price=lambda cost: cost.price if setup.priced else 0.0,
        )
        return VirtualSteps(worker, self._committed, processor, fail)

    def _draft(self) -> VirtualDraft:
        processor, times = Processor(self._loop.time), self._setup.times
        engine = KnownEngine(self._info, self._says(draft_says), times.draft, processor)
        drafter = ModelDrafter(engine, self._setup.drafting)
        answers, one_way_s = attrgetter("proposals"), times.one_way_s
        return VirtualDraft(drafter, _MAX_SEQUENCES, processor, lambda: one_way_s, answers, self._proposed)

    @property
    def _info(self) -> ModelInfo:
        return ModelInfo(self._texts.vocab_size, _MAX_CONTEXT, _BLOCK_SIZE, _NUM_BLOCKS, "none", "cpu", "known", ())

    def _says(self, says: Callable[[Text, int], Guess]) -> Says:
        return lambda row: self._texts.said(row, says)

    # -- requests

    def _begin(self) -> None:
        number = next(self._order)
        text, key = self._texts.texts[number], SequenceKey(1, next(self._keys))
        request = self._request(str(key.sequence_id), number)
        allowed = self._policy.allowance(request)
        draft = self._least_loaded() if allowed.max_draft_tokens else None
        controller = SpeculationController(self._setup.policy, allowed)
        record = self._policy.record(request.tenant, request.model, _DRAFT)
        setting = controller.lost() if draft is None else controller.opened(MAX_DRAFT_TOKENS, record)
        spec = SequenceSpec(
            request.prompt,
            _GREEDY,
            VerificationMode.GREEDY,
            len(text.answer),
            speculation=setting,
            prediction=tuple(text.prediction),
            request_id=request.request_id,
            tenant=text.tenant,
        )
        stream = self._streams[key] = _Stream(key, request, controller, spec, draft)
        self._target.post([Opened(key, spec, self._loop.time())])
        if draft is not None:
            spec = replace(spec, speculation=setting.for_draft(self._sent_price))
            self._tell(stream, lambda at_s: Opened(key, spec, at_s))

    def _request(self, name: str, number: int) -> Request:
        return Request(
            request_id=name,
            tenant=self._texts.texts[number].tenant,
            model=_MODEL,
            prompt=self._texts.prompt(number),
            params=_GREEDY,
            mode=VerificationMode.GREEDY,
            choice=router.SpeculationMode.Value(f"SPECULATION_MODE_{self._setup.mode.upper()}"),
            max_draft_tokens=self._setup.cap,
        )

    def _least_loaded(self) -> VirtualDraft | None:
        serving = [stream.draft for stream in self._streams.values()]
        return min(self._drafts, key=lambda draft: sum(each is draft for each in serving), default=None)

    def _tell(self, stream: _Stream, made: Callable[[float], draft_events.Event]) -> None:
        """Sends an event to the stream's draft, which is made with the time of its arrival."""
        if stream.draft is not None:
            stream.draft.tell(lambda at_s: [made(at_s)])

    # -- what workers report

    def _committed(self, report: TargetReport) -> None:
        for failed in report.failures:
            raise failed.error
        self._price, self._best_chance = report.row_price, report.best_chance or 1.0
        self._price_rows(report.row_price)
        turns = -(-len(report.commits) // tuning.DECISIONS_PER_STEP)
        for committed in report.commits:
            self._follow(self._streams[committed.key], committed, report.step_us, turns)

    def _follow(self, stream: _Stream, committed: StepRow[Any], step_us: int, turns: int) -> None:
        now_s, key = self._loop.time(), committed.key
        finished = committed.finish is not Finish.NONE
        base_len, token_ids = committed.base_len, tuple(committed.token_ids)
        self._tell(stream, lambda at_s: draft_events.DraftCommitted(key, base_len, token_ids, finished, at_s))
        stream.asked[base_len + len(token_ids)] = now_s
        done = _round(stream, committed, step_us)
        self._measure(stream, done)
        stream.committed_s, stream.active, stream.answer_us = now_s, False, 0
        stream.rounds += 1
        self._policy.own_drafts(stream.request, done, self._price)
        if finished:
            del self._streams[key]
            self._tell(stream, lambda at_s: Closed(key))
            self._loop.call_later(self._setup.times.between_s, self._begin)
        elif stream.draft is not None:
            decides = turns == 1 or (stream.rounds + key.sequence_id) % turns == 0
            setting = stream.controller.committed(done, to_us(now_s), self._price, decides=decides)
            self._adjust(stream, setting)

    def _measure(self, stream: _Stream, done: Round) -> None:
        if not self._measuring:
            return
        self._ran.tokens += done.num_tokens
        self._ran.rounds += 1
        self._ran.verified += done.num_verified
        self._ran.accepted += done.num_accepted
        if stream.committed_s >= 0:
            self._ran.gaps.append((self._loop.time() - stream.committed_s, done.num_tokens))

    def _proposed(self, proposed: Proposed) -> None:
        """The target has received a draft's message."""
        if (stream := self._streams.get(proposed.key)) is None:
            return
        now_s = self._loop.time()
        stream.serial += 1
        stream.active = True
        if (asked_s := stream.asked.pop(proposed.tree.base_len, None)) is not None:
            stream.answer_us = to_us(now_s - asked_s)
        tree = replace(proposed.tree, serial=stream.serial, epoch=proposed.epoch, seconds=proposed.compute_s)
        self._target.post([Offered(proposed.key, tree, now_s)])

    # -- settings

    def _adjust(self, stream: _Stream, speculation: Speculation | None) -> None:
        if speculation is None:
            return
        limits = speculation.for_draft(self._sent_price)
        self._target.post([Adjusted(stream.key, speculation)])
        self._tell(stream, lambda at_s: draft_events.Limited(stream.key, limits, at_s))

    def _price_rows(self, price: float) -> None:
        if not price_moved(self._sent_price, price):
            return
        self._sent_price = price
        for stream in self._streams.values():
            if stream.controller.sent.max_draft_tokens:
                limits = stream.controller.sent.for_draft(price)
                self._tell(stream, lambda at_s, it=stream, to=limits: draft_events.Limited(it.key, to, at_s))  # type: ignore[misc]

    def _plan(self) -> None:
        self._loop.call_later(PLAN_EVERY_S, self._plan)
        if self._setup.mode != "auto":
            return
        known = frozenset({draft_version(_DRAFT)} if self._drafts else ())
        states = {_MODEL: TargetState(known, self._price, self._best_chance)}
        if own := self._policy.own_sources.get(_MODEL):
            states[own_drafts_of(_MODEL)] = TargetState(frozenset(own))
        if self._policy.replan(states, self._loop.time()):
            for stream in self._streams.values():
                self._adjust(stream, stream.controller.allow(self._policy.allowance(stream.request)))


def _round(stream: _Stream, committed: StepRow[Any], step_us: int) -> Round:
    times = committed.times
    return Round(
        base_len=committed.base_len,
        token_ids=[],
        rejected=[],
        num_tokens=len(committed.token_ids),
        num_drafted=committed.num_drafted,
        num_verified=committed.num_verified,
        num_accepted=committed.num_accepted,
        num_dropped=committed.num_dropped,
        num_cached_tokens=0,
        finish_reason=sequence_pb2.FINISH_REASON_UNSPECIFIED,
        queue_us=to_us(times.queue_s),
        wait_us=to_us(times.wait_s),
        prefill_us=to_us(times.prefill_s),
        verify_us=step_us,
        draft_active=stream.active or bool(committed.num_drafted),
        answer_us=stream.answer_us,
        draft_useful_us=to_us(committed.draft_useful_s),
        sources=committed.sources,
    )
