"""A target and its draft in one process, in turns and without a network: token ids in, token ids out.

It uses the workers' own scheduling, drafting and verification. `outrider.local` has text in front of it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.draft import events
from outrider.draft.worker import DraftWorker
from outrider.drafters import Drafter
from outrider.drafting.lookup import NAMES
from outrider.drafting.source import CloseReason, DraftSource, make_sources
from outrider.engine import Engine
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.sim.stack import RowPrice, limits_of, target_worker
from outrider.speculation import SamplingParams, VerificationMode
from outrider.target.requests.row import StepRow
from outrider.tree import DraftTree
from outrider.worker.events import Closed, Opened

_STREAM = 1


@dataclass(slots=True)
class Answered:
    """One sequence, from its first token to its last."""

    token_ids: list[int] = field(default_factory=list)
    """With the stop token at the end, if there is one."""
    num_steps: int = 0
    num_drafted: int = 0
    """Drafted tokens that steps took in, those after a rejected one included; branches of one position count once."""
    num_branch_tokens: int = 0
    """Those that were not counted."""
    num_verified: int = 0
    num_accepted: int = 0
    num_hits: int = 0
    """Steps that accepted a drafted token."""
    finished: bool = False
    first_s: float = 0.0
    """When its first tokens came, by the pair's clock."""
    last_s: float = 0.0


class Pair:
    """Loaded models that answer up to `max_sequences` prompts of token ids at once. The target never waits for the
    draft."""

    def __init__(
        self,
        target: Engine,
        drafter: Drafter | None,
        *,
        max_sequences: int = 32,
        max_draft_tokens: int = 4,
        row_price: RowPrice = lambda cost: cost.price,
        lookups: Sequence[str] = NAMES,
        sources: Sequence[DraftSource] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_draft_tokens`: of a proposal of the drafter. `row_price`: as OwnEngine's. `lookups`: names of sources
        besides the drafter; `sources`: further ones."""
        self._limits = limits_of(target.info, max_sequences)
        self._stops = frozenset(target.info.eos_token_ids)
        known = [*make_sources(lookups), *sources]
        if drafter is not None:
            known.append(DrafterSource(DraftWorker(drafter, max_sequences), max_draft_tokens))
        self._clock = clock
        self._target = target_worker(target, self._limits, clock, known, row_price=row_price)
        self._ids = itertools.count()

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        speculate: bool,
        params: SamplingParams | None = None,
        salt: bytes = b"",
        predictions: Sequence[Sequence[int]] = (),
        report: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[Answered]:
        """One answer per prompt, in their order. Greedy unless `params` are given; those are verified in coupled mode.
        `max_new_tokens`: of each, or one per prompt. `predictions`: of each prompt's answer; none, or one per prompt.
        `report`: told the tokens of each step.

        Sequences share cached prefixes only under equal salts. Raises InvalidRequest for a prompt that does not fit,
        and any worker's error.
        """
        speculation = Speculation(max_own_draft_tokens=self._limits.max_draft_tokens if speculate else 0)
        sampling = params or SamplingParams(temperature=0.0)
        mode = VerificationMode.GREEDY if sampling.greedy else VerificationMode.COUPLED
        about: dict[str, Any] = {"speculation": speculation, "stop_token_ids": self._stops, "salt": salt}
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        specs = [
            SequenceSpec(tuple(p), sampling, mode, most, prediction=tuple(prediction), **about)
            for p, most, prediction in zip(prompts, limits, predictions or [()] * len(prompts), strict=True)
        ]
        answers = [Answered() for _ in prompts]
        waiting = deque(zip(specs, answers, strict=True))
        running: dict[SequenceKey, Answered] = {}
        while waiting or running:
            while waiting and len(running) < self._limits.max_sequences:
                spec, answer = waiting.popleft()
                running[self._open(spec)] = answer
            commits = self._step()
            report(sum(len(committed.token_ids) for committed in commits))
            for committed in commits:
                _note(running[committed.key], committed, self._clock())
                if running[committed.key].finished:
                    del running[committed.key]
        return answers

    def _open(self, spec: SequenceSpec) -> SequenceKey:
        self._limits.check(spec)
        key = SequenceKey(_STREAM, next(self._ids))
        self._target.apply(Opened(key, spec, self._clock()))
        return key

    def _step(self) -> list[StepRow[Any]]:
        self._target.step()
        report = self._target.take_report()
        for failed in report.failures:
            raise failed.error
        return report.commits


def _note(answer: Answered, committed: StepRow[Any], now_s: float) -> None:
    answer.last_s = now_s
    answer.first_s = answer.first_s or answer.last_s
    answer.token_ids.extend(committed.token_ids)
    answer.num_steps += 1
    answer.num_drafted += committed.num_drafted
    answer.num_branch_tokens += committed.num_branch_tokens
    answer.num_verified += committed.num_verified
    answer.num_accepted += committed.num_accepted
    answer.num_hits += committed.num_accepted > 0
    answer.finished = committed.finish is not Finish.NONE


class DrafterSource(DraftSource):
    """A draft worker in this process: one round of it for each step of the target."""

    name = "model"

    def __init__(self, worker: DraftWorker, max_tokens: int = 4) -> None:
        """`max_tokens`: of a proposal."""
        self._worker = worker
        self._max_tokens = max_tokens

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        spec = replace(spec, speculation=self._within(spec.speculation))
        self._worker.apply(Opened(key, spec, time.monotonic()))

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        self._worker.apply(
            events.DraftCommitted(key, base_len, tuple(tokens), finished=False, received_s=time.monotonic())
        )

    def limit(self, key: SequenceKey, limits: Speculation) -> None:
        self._worker.apply(events.Limited(key, self._within(limits), time.monotonic()))

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        self._worker.apply(Closed(key))

    def _within(self, limits: Speculation) -> Speculation:
        return replace(limits, max_draft_tokens=min(limits.max_draft_tokens, self._max_tokens))

    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree]]:
        # The target steps those that catch up with their prompts without a draft.
        if self._worker.load.num_waiting:
            self._worker.step()
            report = self._worker.take_report()
            for failed in report.failures:
                raise failed.error
            for proposed in report.proposals:
                yield proposed.key, proposed.tree
