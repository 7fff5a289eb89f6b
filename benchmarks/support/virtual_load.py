"""Many streams on one target in virtual time: the shipped scheduler, calibration and step cost, with simulated steps.

A step takes `base_s` plus `row_s` per row. A draft gives a confidence for each token, and the text defines how far it
is true. The draft's own time and the network are not simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.engine import EngineSequence
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.target.drafts.calibration import Calibration, bin_at
from outrider.target.drafts.choice import Pricing
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.times import Timer
from outrider.target.step.scheduler import Batching, TargetRow, plan
from outrider.target.step.sequence import TargetSequence
from outrider.tree import DraftTree
from outrider.worker.events import SequenceKey
from outrider.worker.step_cost import StepCost

ANSWER_TOKENS = 128
_RIGHT, _WRONG = 7, 8
_GREEDY = SamplingParams(temperature=0.0)
_BATCHING = Batching(block_size=16, max_batch_tokens=4096)

Price = Callable[[StepCost], float]
ARMS: dict[str, Price] = {"off": lambda cost: 1e9, "on": lambda cost: 0.0, "auto": lambda cost: cost.price}


@dataclass(frozen=True, slots=True)
class Text:
    """The text of one tenant's requests."""

    says: tuple[float, float]
    """A draft's confidence in its tokens: uniform between these."""
    true: float = 1.0
    """Real probability of a drafted token over the draft's confidence."""
    tenant: str = ""
    lost_s: tuple[float, float] = (math.inf, math.inf)
    """Between these seconds of a run every drafted token is wrong."""

    def chance(self, confidence: float, now_s: float) -> float:
        return 0.0 if self.lost_s[0] <= now_s < self.lost_s[1] else confidence * self.true


NEAR = Text((0.6, 1.0))
FAR = Text((0.2, 0.9), true=0.35)


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of one stream in one step."""

    at_s: float
    text: Text
    offered: int
    """Drafted tokens; then the numbers of them that were run, verified and accepted."""
    run: int
    verified: int
    accepted: int
    tokens: int


Watch = Callable[[Committed], None]


@dataclass(frozen=True, slots=True)
class StepLine:
    """Step time of one machine."""

    base_s: float
    row_s: float

    def seconds(self, rows: int) -> float:
        return self.base_s + self.row_s * rows


@dataclass(slots=True)
class RunResult:
    """The result of a run."""

    seconds: float = 0.0
    tokens: dict[Text, int] = field(default_factory=dict)
    drafted: dict[Text, int] = field(default_factory=dict)
    """Drafted rows that were run, by text."""

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return sum(self.tokens.values()) / self.seconds


def run(
    line: StepLine,
    texts: Sequence[Text],
    arm: str,
    *,
    seconds: float = 60.0,
    num_drafted: int = 4,
    plain: Collection[Text] = (),
    answer_tokens: int = ANSWER_TOKENS,
    watch: Watch = lambda committed: None,
) -> RunResult:
    """One stream for each of `texts`; each begins a new answer when the last one ends. `plain` ones have no drafts."""
    chance, serials = random.Random(5), iter(range(1 << 30))
    ran = RunResult(tokens=dict.fromkeys(texts, 0), drafted=dict.fromkeys(texts, 0))
    cost, calibration, price = StepCost(), Calibration(), ARMS[arm]
    streams = [_Stream(text, calibration, num_drafted * (text not in plain), answer_tokens) for text in texts]
    for stream in streams:
        stream.begin(next(serials))
    while ran.seconds < seconds:
        now = price(cost)
        for stream in streams:
            if not stream.sequence.remaining:
                stream.begin(next(serials))
            stream.draft(chance, now, ran.seconds)
        rows = plan([s.sequence for s in streams], _BATCHING, 1 << 20, ran.seconds, Pricing(now, calibration)).rows
        by_serial = {row.sequence.serial: row for row in rows}
        took = line.seconds(sum(row.num_run for row in rows))
        ran.seconds += took
        tokens = 0
        for stream in streams:
            done = stream.commit(by_serial[stream.sequence.serial], ran.seconds)
            ran.drafted[stream.text] += done.run
            ran.tokens[stream.text] += done.tokens
            tokens += done.tokens
            watch(done)
        calibration.stepped()
        cost.took(rows=sum(row.num_run for row in rows), seconds=took, tokens=tokens)
    return ran


@dataclass(slots=True)
class _Stream:
    text: Text
    calibration: Calibration
    num_drafted: int
    answer_tokens: int
    sequence: TargetSequence = field(init=False)

    def begin(self, serial: int) -> None:
        opening = SequenceSpec(
            prompt=(1,),
            params=_GREEDY,
            mode=VerificationMode.GREEDY,
            max_new_tokens=self.answer_tokens,
            speculation=Speculation(max_draft_tokens=self.num_drafted),
        )
        drafts = SequenceDrafts.of(opening)
        self.sequence = TargetSequence(SequenceKey(1, serial), serial, opening, 1 << 20, Timer(0.0), drafts)
        self.sequence.drafts.fit = self.calibration.fit(self.text.tenant)
        self.sequence.kv = EngineSequence(tokens=[])

    def draft(self, chance: random.Random, price: float, now_s: float) -> None:
        """Offers a new draft, up to the first token below the price. The right token is always 7."""
        tokens, confidences = [], []
        for confidence in self._confidences(chance, price):
            confidences.append(confidence)
            tokens.append(_RIGHT if chance.random() < self.text.chance(confidence, now_s) else _WRONG)
        length = self.sequence.committed_len
        tree = DraftTree(length, tuple(tokens), chances=tuple(confidences), source="model", epoch=length)
        self.sequence.drafts.buffer.keep(lambda held: held.upto(0))
        self.sequence.drafts.offer(tree)

    def _confidences(self, chance: random.Random, price: float) -> Iterator[float]:
        joint = 1.0
        for _ in range(self.num_drafted):
            if joint < price:
                return
            confidence = chance.uniform(*self.text.says)
            joint *= confidence
            yield confidence

    def commit(self, row: TargetRow, now_s: float) -> Committed:
        sequence, draft = self.sequence, row.draft
        offered, guess = min(sequence.drafts.buffer.num_sent, sequence.max_depth), draft.guess()
        accepted = next((n for n, token in enumerate(guess) if token != _RIGHT), len(guess))
        verified = min(accepted + 1, len(guess))
        seen = [(bin_at(draft, node, node + 1), node < accepted) for node in range(verified)]
        self.calibration.observe(seen, sequence.drafts.fit)
        tokens = [*guess[:accepted], _RIGHT][: sequence.remaining]
        sequence.drafts.advance(tokens, len(guess))
        sequence.commit(tokens)
        assert sequence.kv is not None
        sequence.kv.tokens = sequence.tokens[:-1]
        return Committed(now_s, self.text, offered, len(guess), verified, accepted, len(tokens))
