"""Events from outside the target worker, already translated and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.sequence.speculation import Speculation
from outrider.speculation import Grammar
from outrider.tree import DraftTree
from outrider.worker.events import SequenceKey, WorkerEvent


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar that an opened sequence waits for. If it cannot be compiled, the sequence is refused."""

    key: SequenceKey
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class GrammarWork:
    """A thread has worked on a sequence's grammar for so long. Its masks may be ready now."""

    key: SequenceKey
    seconds: float


@dataclass(frozen=True, slots=True)
class Offered:
    """A draft of the pool."""

    key: SequenceKey
    tree: DraftTree
    received_s: float = 0.0
    """Monotonic."""


@dataclass(frozen=True, slots=True)
class Adjusted:
    key: SequenceKey
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class Paired:
    """A draft worker that reads features has been sent the sequence."""

    key: SequenceKey
    bits: int = 16
    """The fewest of a number that it reads."""


@dataclass(frozen=True, slots=True)
class Erased:
    """What was learnt from a tenant's texts is to be forgotten; with `samples`, what was recorded of them."""

    tenant: str
    samples: bool
    ordered_us: int
    """When it was ordered; 0: all that is here now."""
    done: Callable[..., None]
    """Called on a thread of the worker with the number of texts that were forgotten; of samples, also with the volume,
    and whether somebody keeps what it has read of them."""


TargetEvent = Compiled | GrammarWork | Offered | Adjusted | Paired | Erased
Event = TargetEvent | WorkerEvent
