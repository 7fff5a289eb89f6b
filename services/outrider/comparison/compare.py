"""Replays a target's texts with each draft and each mixture, and finds the mixture that is fastest."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from outrider.comparison.loaded import CompareConfig, Loaded, Parts, Report, load
from outrider.comparison.places import MeasuredDrafts, Placeable, Rounds
from outrider.comparison.step_line import StepLine, measure_steps, quiet_clock
from outrider.comparison.texts import grown
from outrider.engine import Engine, Row
from outrider.heads import HeadDrafts
from outrider.sim.engine import Guess, KnownEngine
from outrider.sim.pair import Answered, DrafterSource
from outrider.sim.worker import Processor

# A source more has to bring this much.
_GAIN = 1.01


@dataclass(frozen=True, slots=True)
class Shares:
    """What came of the drafts of some texts, one stream at a time."""

    acceptance: float
    """Accepted of the drafted tokens that were verified: up to the first rejected one of a round."""
    of_drafted: float
    """Accepted of all drafted tokens, those after a rejected one included; branches of one position count once."""
    hits: float
    """Share of rounds that accepted a drafted token."""
    tokens_per_round: float
    times_plain: float

    @classmethod
    def of(cls, answers: Sequence[Answered], seconds: float, plain_s: float) -> Shares:
        rounds = max(1, sum(answer.num_steps for answer in answers))
        verified = max(1, sum(answer.num_verified for answer in answers))
        drafted = max(1, sum(answer.num_drafted for answer in answers))
        accepted = sum(answer.num_accepted for answer in answers)
        return cls(
            round(accepted / verified, 4),
            round(accepted / drafted, 4),
            round(sum(answer.num_hits for answer in answers) / rounds, 4),
            round(sum(len(answer.token_ids) for answer in answers) / rounds, 4),
            round(plain_s / seconds, 4),
        )


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """One draft, or a mixture."""

    name: str
    all: Shares
    categories: dict[str, Shares]
    proposal_ms: float
    """What a round of one stream takes beside the step of the target, beyond a plain round."""
    times_plain: dict[int, float]
    """Time of plain decoding over time with these drafts, prompts included, by the number of streams."""


@dataclass(frozen=True, slots=True)
class Comparison:
    drafts: list[DraftFigures]
    best: str
    """The fastest at one stream."""
    plain_tokens_per_second: dict[int, float]
    agreement: float | None
    """Of answers that existed: the share of their tokens that the target would have said at temperature 0."""
    measured: MeasuredDrafts
    """Of which `places` tells where a draft should run."""


def compare(config: CompareConfig, report: Report) -> Comparison:
    """Raises CheckpointError for a model or head that cannot be used, ValueError for mixtures that are not served."""
    replayed, agreement = replays(config, report)
    best = replayed.best(config.mixtures)
    return Comparison(
        [replayed.figures(parts) for parts in dict.fromkeys([*config.mixtures, best])],
        "+".join(best),
        {streams: replayed.run((), streams).tokens_per_second for streams in config.streams},
        agreement,
        replayed.measured(config.mixtures),
    )


def replays(config: CompareConfig, report: Report) -> tuple[Replays, float | None]:
    """What replays the texts; and of answers that existed, the share of their tokens that the target would say. Raises
    as `compare`."""
    loaded = load(config, report)
    states, agreement = loaded.read(report)
    report("measures steps of the target")
    context = round(statistics.median(len(text.prompt) + len(text.answer) / 2 for text in loaded.texts))
    line = measure_steps(loaded.engine, config.streams, context)
    known = KnownTexts([text.tokens for text in loaded.texts], states)
    return Replays(loaded, known, line, report), agreement


@dataclass(frozen=True, slots=True)
class _Replayed:
    """All texts, answered once."""

    answers: list[Answered]
    started_s: float
    steps_s: float
    """Time of the target's steps."""
    num_steps: int
    """Of all streams together."""

    @property
    def total_s(self) -> float:
        return max(answer.last_s for answer in self.answers) - self.started_s

    @property
    def overhead_s(self) -> float:
        """Time of a round of all streams apart from the step of the target."""
        return (self.total_s - self.steps_s) / self.num_steps

    @property
    def seconds(self) -> list[float]:
        """Of each answer, prompt included; at one stream."""
        return [end - start for start, end in pairwise([self.started_s, *(each.last_s for each in self.answers)])]

    @property
    def tokens_per_second(self) -> float:
        return round(sum(len(answer.token_ids) for answer in self.answers) / self.total_s, 2)


@dataclass(slots=True)
class Replays:
    loaded: Loaded
    known: KnownTexts
    line: StepLine
    report: Report
    _done: dict[tuple[Parts, int], _Replayed] = field(default_factory=dict)

    def run(self, parts: Parts, streams: int) -> _Replayed:
        """Once for each mixture, whatever the order of its sources."""
        key = tuple(sorted(parts)), streams
        if key not in self._done:
            self.report(f"replays {'+'.join(parts) or 'plain decoding'}, streams: {streams}")
            engine = ReplayEngine(self.loaded.engine, self.known, self.line)
            started_s = engine.clock()
            _, answers = self.loaded.answer(engine, parts, streams, engine.clock)
            self._done[key] = _Replayed(answers, started_s, engine.steps_s, engine.num_steps)
        return self._done[key]

    def times_plain(self, parts: Parts, streams: int) -> float:
        return round(self.run((), streams).total_s / self.run(parts, streams).total_s, 4)

    def best(self, mixtures: Sequence[Parts]) -> Parts:
        """Adds to the fastest what makes it faster, one source at a time."""
        found = max(mixtures, key=lambda parts: self.times_plain(parts, 1))
        singles = list(dict.fromkeys(part for parts in mixtures for part in parts))
        while larger := [(*found, part) for part in singles if self.loaded.drafts.serves((*found, part))]:
            fastest = max(larger, key=lambda parts: self.times_plain(parts, 1))
            if self.times_plain(fastest, 1) < _GAIN * self.times_plain(found, 1):
                break
            found = fastest
        return next((parts for parts in mixtures if set(parts) == set(found)), found)

    def figures(self, parts: Parts) -> DraftFigures:
        by_category: dict[str, list[int]] = defaultdict(list)
        for number, text in enumerate(self.loaded.texts):
            by_category[text.category].append(number)
        return DraftFigures(
            "+".join(parts),
            self._shares(parts, range(len(self.loaded.texts))),
            {category: self._shares(parts, numbers) for category, numbers in by_category.items()},
            round(1000 * (self.run(parts, 1).overhead_s - self.run((), 1).overhead_s), 3),
            {streams: self.times_plain(parts, streams) for streams in self.loaded.config.streams},
        )

    def measured(self, mixtures: Sequence[Parts]) -> MeasuredDrafts:
        """Of the mixtures with one draft that could run elsewhere."""
        streams = sorted(self.loaded.config.streams)
        found = [
            Placeable("+".join(parts), bytes_, tuple(self._rounds(parts, n) for n in streams))
            for parts in mixtures
            if (bytes_ := self._feature_bytes(parts)) is not None
        ]
        return MeasuredDrafts(self.line, {n: self.run((), n).overhead_s for n in streams}, tuple(found))

    def _feature_bytes(self, parts: Parts) -> int | None:
        """As of a Placeable; None for a mixture without a head or model, or with both."""
        found = [
            each.feature_bytes(self.known.states_at([0])) if isinstance(each, HeadDrafts) else 0
            for each in self.loaded.drafts.sources(parts)
            if isinstance(each, HeadDrafts | DrafterSource)
        ]
        return found[0] if len(found) == 1 else None

    def _rounds(self, parts: Parts, streams: int) -> Rounds:
        drafted, plain = self.run(parts, streams), self.run((), streams)
        rounds = sum(answer.num_steps for answer in drafted.answers)
        return Rounds(
            streams,
            sum(len(answer.token_ids) for answer in drafted.answers) / rounds,
            sum(answer.num_drafted + answer.num_branch_tokens for answer in drafted.answers) / rounds,
            max(0.0, drafted.overhead_s - plain.overhead_s),
        )

    def _shares(self, parts: Parts, numbers: Sequence[int]) -> Shares:
        drafted, plain = self.run(parts, 1), self.run((), 1)
        answers, spent, plain_spent = drafted.answers, drafted.seconds, plain.seconds
        return Shares.of(
            [answers[n] for n in numbers], sum(spent[n] for n in numbers), sum(plain_spent[n] for n in numbers)
        )


# As much as a step of a model reads, so that a draft's weights are not in the CPU's caches after it either.
_SWEPT_BYTES = 32 << 20


class KnownTexts:
    """What the target says after each beginning of its texts, and its states there."""

    def __init__(self, texts: Sequence[Sequence[int]], states: Sequence[Tensor] = ()) -> None:
        """states: of each text, [tokens, layers · width]; none where no head reads them."""
        self._states = states
        self._places: dict[int, tuple[int, int]] = {}
        """Hash of a beginning → (text, its length)."""
        self._following: dict[int, int] = {}
        """The same → the token after it, if a text goes on."""
        for number, text in enumerate(texts):
            beginning = 0
            for length, token in enumerate(text, 1):
                self._following.setdefault(beginning, token)
                beginning = grown(beginning, token)
                self._places.setdefault(beginning, (number, length))

    def token_after(self, beginning: int) -> int:
        """0 where no text goes on."""
        return self._following.get(beginning, 0)

    def states_at(self, beginnings: Sequence[int]) -> Tensor:
        """[beginnings, layers · width], of the last token of each; zeros for what is in no text."""
        found = self._states[0].new_zeros(len(beginnings), self._states[0].shape[1])
        for row, beginning in enumerate(beginnings):
            if (place := self._places.get(beginning)) is not None:
                found[row] = self._states[place[0]][place[1] - 1]
        return found


class ReplayEngine(KnownEngine):
    """In the place of another engine: it says what the texts say, by the clock of the machine, which runs on by the
    time of the steps that it does not run."""

    def __init__(self, engine: Engine, texts: KnownTexts, line: StepLine) -> None:
        processor = Processor(quiet_clock(engine))
        super().__init__(engine.info, self._said, self._seconds_of, processor, states=self._known_states)
        self.clock = processor.clock
        self._texts = texts
        self._line = line
        self._swept = torch.zeros(_SWEPT_BYTES // 4)

    def _seconds_of(self, sequences: int, rows: int, prompt_tokens: int) -> float:
        self._swept.sum()
        return self._line.seconds(sequences, rows, prompt_tokens)

    def _said(self, row: Row) -> Iterator[Guess]:
        for beginning in list(_beginnings(row))[len(row.token_ids) - row.num_logits :]:
            yield ((self._texts.token_after(beginning), 1.0),)

    def _known_states(self, rows: Sequence[Row]) -> Tensor:
        return self._texts.states_at(
            [each for row in rows for each in list(_beginnings(row))[len(row.token_ids) - row.num_tapped :]]
        )


def _beginnings(row: Row) -> Iterator[int]:
    """For each token of the row, the hash of all up to it."""
    beginning = 0
    for token in row.sequence.tokens:
        beginning = grown(beginning, token)
    chain, nodes = row.num_chain_tokens, dict[int, int]()
    for token in row.token_ids[:chain]:
        beginning = grown(beginning, token)
        yield beginning
    nodes[-1] = beginning
    for node, (token, parent) in enumerate(zip(row.token_ids[chain:], row.parents, strict=True)):
        nodes[node] = grown(nodes[parent], token)
        yield nodes[node]
