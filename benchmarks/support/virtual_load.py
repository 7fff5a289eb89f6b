"""Many streams on one target in virtual time: half of them near to what the draft knows, half far from it.

The shipped target worker, its price, calibration and the router's plan, on texts whose every token is known. A step
takes `base_s` plus `row_s` per row. Drafts are there before each step, as if they took no time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider_controller.whatif.stack import RunResult, Setup, Times, VirtualStack
from outrider_controller.whatif.texts import ReplayedLookups, Text, Texts

_RIGHT, _WRONG = 7, 8
_PROMPT, _ANSWER, _EACH, _DRAFTED = 8, 128, 16, 4
_SOURCE = "known"
ARMS = {"off": ("off", True), "on": ("on", False), "auto": ("auto", True)}
"""Mode of the requests, and whether a row has to be worth its price."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Of one tenant's texts."""

    tenant: str
    says: tuple[float, float]
    """A draft's confidence in its tokens: uniform between these."""
    true: float = 1.0
    """Real probability of a drafted token over the draft's confidence."""

    def text(self, chance: random.Random) -> Text:
        said = [chance.uniform(*self.says) for _ in range(_ANSWER)]
        guesses = [((_RIGHT if chance.random() < one * self.true else _WRONG, one),) for one in said]
        return Text([1] * _PROMPT, [_RIGHT] * _ANSWER, (), {_SOURCE: guesses}, self.tenant)


NEAR, FAR = Domain("near", (0.6, 1.0)), Domain("far", (0.2, 0.9), true=0.35)


@dataclass(frozen=True, slots=True)
class StepLine:
    """Step time of one machine."""

    base_s: float
    row_s: float

    def seconds(self, rows: int) -> float:
        return self.base_s + self.row_s * rows


def run(line: StepLine, streams: int, arm: str, *, steps: int = 1000) -> RunResult:
    """For about as long as so many plain steps take."""
    chance = random.Random(5)
    texts = Texts([domain.text(chance) for _ in range(_EACH) for domain in (NEAR, FAR)], 64)
    mode, priced = ARMS[arm]
    setup = Setup(
        Times(lambda sequences, rows, tokens: line.seconds(rows), lambda sequences, rows, tokens: 0.0, between_s=0.0),
        streams=streams,
        drafts=0,
        cap=_DRAFTED,
        mode=mode,
        priced=priced,
        sources=lambda known: [ReplayedLookups(_SOURCE, known)],
    )
    seconds = steps * line.seconds(streams)
    return VirtualStack(texts, setup).run(seconds, seconds / 5)
