"""What an engine is for a target: it runs open sequences step by step. Drafts, commits and reports are the target's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import Grammar
from outrider.target.drafts.calibration import Calibration
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.limits import Limits
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Timer
from outrider.worker.events import Opened
from outrider.worker.step_cost import StepCost
from outrider.worker.watchdog import StepPace


class PortSequence(Protocol):
    """One sequence of a target, as its engine keeps it."""

    spec: SequenceSpec
    timer: Timer
    drafts: SequenceDrafts
    grammar_s: float

    def take_grammar(self, grammar: Grammar | None) -> None:
        """It may run from here on: it has no grammar, or this one."""
        ...

    def grammar_worked(self, seconds: float) -> None:
        """A thread has worked on its grammar."""
        ...


S = TypeVar("S", bound=PortSequence)


@dataclass(slots=True)
class EngineStep:
    rows: Sequence[StepRow[Any]] = ()
    """What ran. Of one that decides, what it commits; or its error."""
    wake_at_s: float | None = 0.0
    """When to call again if no event comes before: 0 for at once, None for never, else monotonic seconds."""
    seconds: float | None = None
    """What it took, where the call began before the step or after it."""


class EngineRoom(NamedTuple):
    num_running: int
    """Sequences that hold KV."""
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    pace: StepPace
    plans_ahead: bool = False
    """Whether a step may be planned while the one before it runs. It then follows the drafts of its sequences itself,
    and learns what steps cost and what comes of drafts."""
    cost: StepCost = field(default_factory=StepCost)
    calibration: Calibration = field(default_factory=Calibration)


class EnginePort(Protocol[S]):
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def row_price(self) -> float:
        """Price of one more row in a step, as a chance."""
        ...

    def deepen(self, speculation: Speculation) -> Speculation:
        """What sources of drafts are told of a sequence's setting."""
        ...

    def open(self, event: Opened, drafts: SequenceDrafts, limits: Limits) -> S:
        """The sequence begins, and runs once it is given its grammar. Raises what is wrong with it."""
        ...

    def room(self) -> EngineRoom: ...

    def run(self, sequences: Iterable[S], now_s: float, taps: tuple[int, ...] | None) -> EngineStep:
        """Runs one step. `taps`: as of a source of drafts."""
        ...

    def follow(self, row: StepRow[S]) -> None:
        """After a row without error has been looked at, before what it commits is reported."""
        ...

    def close(self, sequence: S) -> None:
        """It is not run any more. May come twice."""
        ...

    def prefix_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Prefixes that were added to the cache, and those removed, since the last call."""
        ...

    def drop_prefixes(self) -> None:
        """Empties the prefix cache, where it is this target's own."""
        ...
