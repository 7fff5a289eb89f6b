"""What makes drafts: the protocol of all sources, what they are told of a sequence, and their kinds by name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftAssignment:
    """The draft worker that a router chose for a sequence."""

    worker_id: str
    """The worker expected at the address."""
    address: str
    """HOST:PORT. It is called only if the worker's lease has the same address."""
    sequence_id: int
    """Id under which the sequence is opened there; never reused."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a head on a draft worker reads of the target: a vector for each committed position from `start` on."""

    start: int
    rows: bytes
    """As messages have them."""
    bits: int = 16
    """Of a number in them: 8 or 16."""
    first: bool = False
    """Whether a draft that has read nothing begins with these."""


class Seen(NamedTuple):
    """The target's states at committed positions of a sequence, before the commit that gives the token after them."""

    key: SequenceKey
    start: int
    """The first position."""
    states: Any
    """A tensor [positions, layers · width], which may be a view of the whole step's."""


class CloseReason(enum.IntEnum):
    """Why a sequence is closed. The values are those of messages."""

    FINISHED = 1
    CANCELLED = 2
    DEADLINE = 3
    MOVED = 4
    """The sequence continues, elsewhere or without this source."""


class DraftSource:
    """Proposes for sequences that a target runs. Never waited for; may fail at any time.

    Owned by one thread, which makes all calls. A key that is not open is ignored.
    """

    name: str
    """Its kind, for operators."""
    taps: tuple[int, ...] | None = None
    """The layers whose inputs it reads; empty: what the target's vocabulary head reads; None: it reads none."""
    for_workers = False
    """Whether it serves draft workers, and so goes by their limits."""

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        """The sequence begins. `tokens`: its prompt and all that is committed, which grows as the target commits."""

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        """The target has committed these tokens at base_len, where the last commit ended. They are among those of the
        opening by now, and later ones may be."""

    def limit(self, key: SequenceKey, limits: Speculation) -> None:
        """From now on these limits hold."""

    def paired(self, key: SequenceKey, bits: int) -> None:
        """A draft worker has it now that reads features, of at least so many bits a number, and has read none of it."""

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        """The sequence has ended here."""

    def poll(self) -> Iterable[tuple[SequenceKey, DraftTree]]:
        """What was proposed since the last call."""
        return ()

    def see(self, step: Sequence[Seen]) -> Sequence[tuple[SequenceKey, Features]]:
        """Of all rows of a step, before its commits. Returns what heads on draft workers read of them."""
        return ()

    def erase(self, tenant: str) -> int:
        """Forgets the texts of a tenant, those of its running sequences too; returns how many. Any thread may call."""
        return 0


KINDS: dict[str, Callable[[], DraftSource]] = {}
"""What makes each kind of source in the target's own process, by name."""


def register(name: str) -> Callable[[Callable[[], DraftSource]], Callable[[], DraftSource]]:
    """Makes a kind of source known by its name, with the function that makes one."""

    def known(make: Callable[[], DraftSource]) -> Callable[[], DraftSource]:
        if name in KINDS:
            raise ValueError(f"a source is called {name!r} already")
        KINDS[name] = make
        return make

    return known


def make_sources(names: Iterable[str]) -> list[DraftSource]:
    """One source for each name. Raises ValueError for a name that is not registered."""
    found = []
    for name in names:
        if name not in KINDS:
            raise ValueError(f"{name!r} is not a source of drafts; the sources are {', '.join(sorted(KINDS))}")
        found.append(KINDS[name]())
    return found
