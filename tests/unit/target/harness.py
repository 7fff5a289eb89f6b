"""A worker on a tiny real model, driven step by step with a clock of our own; and drafts of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from outrider.drafting.source import DraftSource
from outrider.engine import Engine, EngineConfig
from outrider.engine.loading.loader import load_engine
from outrider.sequence.key import Finish
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.sim.stack import RowPrice, limits_of, target_worker
from outrider.speculation import Grammar, SamplingParams, VerificationMode
from outrider.target.requests.events import Adjusted, Compiled, Event, Offered
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.target.step.worker import TargetWorker
from outrider.tree import DraftTree
from outrider.worker.events import Closed, Opened, PeerStreamEnded, SequenceKey

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)

FLOAT32 = EngineConfig(dtype="float32", block_size=8)
FOUR_AHEAD = Speculation(max_draft_tokens=4)

Drafter = Callable[[int, Sequence[int]], Sequence[DraftTree]]
"""(sequence id, committed tokens with the prompt) → drafts offered before the next step."""
Texts = dict[int, list[int]]


def one_sampling_each(name: str, quick: Mapping[str, SamplingParams]) -> pytest.MarkDecorator:
    """Parametrises `name` and `params`. `quick`: the sampling that each is tested with quickly; the other is slow."""
    cases = [
        pytest.param(value, params, id=f"{value}-{mode}", marks=() if params is wanted else pytest.mark.slow)
        for value, wanted in quick.items()
        for mode, params in (("greedy", GREEDY), ("coupled", SAMPLED))
    ]
    return pytest.mark.parametrize((name, "params"), cases)


def opening(
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 24,
    params: SamplingParams = GREEDY,
    mode: VerificationMode | None = None,
    stops: Sequence[int] = (),
    committed: Sequence[int] = (),
    speculation: Speculation = FOUR_AHEAD,
    salt: bytes = b"",
) -> SequenceSpec:
    fallback = VerificationMode.GREEDY if params.greedy else VerificationMode.COUPLED
    return SequenceSpec(
        prompt=tuple(prompt),
        params=params,
        mode=mode or fallback,
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset(stops),
        committed=tuple(committed),
        speculation=speculation,
        salt=salt,
    )


def key(sequence_id: int, stream: int = 1) -> SequenceKey:
    return SequenceKey(stream, sequence_id)


@dataclass
class Answer:
    """Everything one sequence was told."""

    commits: list[StepRow[Any]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return [token for commit in self.commits for token in commit.token_ids]

    @property
    def finish(self) -> Finish:
        return self.commits[-1].finish if self.commits else Finish.NONE


class WorkerBench:
    """A worker, its clock, and what it said."""

    def __init__(self, limits: Limits, make: Callable[[Callable[[], float]], TargetWorker[Any]]) -> None:
        """`make`: the worker, with this clock."""
        self.limits = limits
        self.now_s = 100.0
        self.worker = make(lambda: self.now_s)
        self.answers: dict[SequenceKey, Answer] = {}
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.reports: list[TargetReport] = []

    def open(self, sequence_id: int, what: SequenceSpec, grammar: Grammar | None = None) -> SequenceKey:
        """`grammar`: that of its logits, compiled."""
        what.check(self.limits.vocab_size, self.limits.max_context_len)
        self.tokens[key(sequence_id)] = [*what.prompt, *what.committed]
        self.apply(Opened(key(sequence_id), what, self.now_s))
        if grammar is not None:
            self.apply(Compiled(key(sequence_id), grammar))
        return key(sequence_id)

    def offer(self, sequence_id: int, base_len: int, token_ids: Sequence[int], epoch: int = 0) -> None:
        self.apply(Offered(key(sequence_id), DraftTree(base_len, tuple(token_ids), epoch=epoch)))

    def adjust(self, sequence_id: int, speculation: Speculation) -> None:
        self.apply(Adjusted(key(sequence_id), speculation))

    def close(self, sequence_id: int) -> None:
        self.apply(Closed(key(sequence_id)))

    def end_stream(self, stream: int = 1) -> None:
        self.apply(PeerStreamEnded(stream))

    def apply(self, event: Event) -> None:
        self.worker.apply(event)
        self._listen()

    def step(self) -> float | None:
        wake_at_s = self.worker.step()
        self._listen()
        return wake_at_s

    def run(self, drafter: Drafter = lambda sequence_id, tokens: (), max_steps: int = 2000) -> None:
        """Steps until nothing is open, offering what the drafter says before each step."""
        for _ in range(max_steps):
            if not self.worker.load.num_sequences:
                return
            for k, tokens in self.tokens.items():
                for draft in drafter(k.sequence_id, tokens):
                    self.apply(Offered(k, draft))
            self.step()
        raise AssertionError(f"still open after {max_steps} steps")

    def answer(self, what: Sequence[SequenceSpec], drafter: Drafter = lambda sequence_id, tokens: ()) -> Texts:
        """Opens them all and runs them to their ends."""
        for number, one in enumerate(what):
            self.open(number, one)
        self.run(drafter)
        return self.texts

    @property
    def texts(self) -> Texts:
        """Prompt and output of each."""
        return {each.sequence_id: tokens for each, tokens in self.tokens.items()}

    def _listen(self) -> None:
        report = self.worker.take_report()
        self.reports.append(report)
        for commit in report.commits:
            assert commit.base_len == len(self.tokens[commit.key]), "a commit continues what was committed"
            self.tokens[commit.key].extend(commit.token_ids)
            self.answers.setdefault(commit.key, Answer()).commits.append(commit)
        for failed in report.failures:
            self.answers.setdefault(failed.key, Answer()).errors.append(failed.error)


class Bench(WorkerBench):
    """Of our own engine."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        num_blocks: int = 256,
        max_batch_tokens: int = 64,
        max_sequences: int = 40,
        prefix_cache: bool = True,
        wrap: Callable[[Engine], Engine] = lambda engine: engine,
        row_price: RowPrice = lambda cost: cost.price,
        sources: Sequence[DraftSource] = (),
        arithmetic: EngineConfig = FLOAT32,
    ) -> None:
        config = replace(
            arithmetic, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, prefix_cache=prefix_cache
        )
        self.engine = wrap(load_engine(checkpoint, config))
        limits = limits_of(self.engine.info, max_sequences)
        super().__init__(
            limits,
            lambda clock: target_worker(
                *(self.engine, limits, clock, sources), max_batch_tokens=max_batch_tokens, row_price=row_price
            ),
        )


def prompts(count: int, *, longest: int = 60, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@dataclass
class Liar:
    """A draft that knows the text to come and says it, distorted."""

    texts: dict[int, list[int]]
    """Per sequence: prompt and output of a plain run."""
    how: str
    vocab_size: int = 384
    rng: random.Random = field(default_factory=lambda: random.Random(11))

    def __call__(self, sequence_id: int, tokens: Sequence[int]) -> list[DraftTree]:
        how = self.how if self.how != "random" else self.rng.choice(["right", "wrong", "stale", "gapped", "oversized"])
        base, text = len(tokens), self.texts[sequence_id]
        count = self.rng.randint(1, 6)
        if how == "stale":
            base = max(0, base - self.rng.randint(1, 5))
        if how == "gapped":
            base += self.rng.randint(1, 4)
        if how == "oversized":
            count = 60
        guess = text[base : base + count] or [5]
        if how == "ahead":
            # As drafts of older versions run ahead of their own proposal.
            following = text[base + count : base + 2 * count] or [5]
            return [DraftTree(base, tuple(guess)), DraftTree(base + len(guess), tuple(following))]
        if how == "beside":
            at = self.rng.randrange(len(guess))
            others = (guess[at], (guess[at] + 2) % self.vocab_size)
            guess[at] = (guess[at] + 1) % self.vocab_size
            parents = (*range(-1, len(guess) - 1), at - 1, at - 1)
            chances = (0.9,) * len(parents)
            return [DraftTree(base, (*guess, *others), parents=parents, chances=chances)]
        if how == "wrong" or (how == "stale" and self.rng.random() < 0.5):
            at = self.rng.randrange(len(guess))
            guess = [*guess[:at], (guess[at] + 1) % self.vocab_size, *guess[at + 1 :]]
        return [DraftTree(base, tuple(guess), epoch=self.rng.randint(0, 3))]
