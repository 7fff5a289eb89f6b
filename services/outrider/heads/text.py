"""One sequence of a head: what the head has read of it, and the draft that grows beyond. Knows no head and no batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider import tuning
from outrider.engine import EngineSequence
from outrider.options.sampling import Q_TOTAL, DraftDistribution
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import Proposal
from outrider.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class Place:
    """After some token: what the head says there."""

    feature: Tensor
    """[1, width] What the next step goes on from."""
    logits: Tensor
    """[1, logits width]; of a head with lookahead [lookahead, logits width]."""


@dataclass(slots=True)
class HeadText:
    """The head has read the positions from `begin` up to `read`; the features of `waiting` come after them."""

    spec: SequenceSpec
    tokens: Sequence[int]
    """Prompt and committed output. Their owner extends them."""
    kv: EngineSequence
    begin: int = 0
    read: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    """Each [positions, width]."""
    place: Place | None = None
    """After the last position that the head has read, where it has read one."""

    @property
    def seen(self) -> int:
        return self.read + sum(len(features) for features in self.waiting)

    @property
    def has_seen(self) -> bool:
        """Whether a feature has come since it began."""
        return self.place is not None or bool(self.waiting)

    @property
    def num_unread(self) -> int:
        """Positions that can be read: their features are here, and the tokens after them."""
        return max(0, min(self.seen, len(self.tokens) - 1) - self.read)

    @property
    def ready(self) -> bool:
        """Whether all is read, up to the last token."""
        return self.place is not None and self.read == len(self.tokens) - 1


@dataclass(slots=True)
class GrowingDraft:
    """A tree as it is drafted: a chain, with alternatives beside its tokens."""

    base_len: int
    stop_token_ids: frozenset[int]
    place: Place
    """Where the head is now."""
    least: float
    """Chance of the whole draft, below which it ends."""
    chain: list[int] = field(default_factory=list)
    joint: float = 1.0
    ended: bool = False
    most: int | None = None
    """Ratio mode: how many tokens may be drawn, decided before the first is. The draw must not decide how long a draft
    takes, and so whether it comes in time."""
    _ids: list[int] = field(default_factory=list)
    _parents: list[int] = field(default_factory=list)
    _chances: list[float] = field(default_factory=list)
    _q: list[DraftDistribution] = field(default_factory=list)
    _last: int = ROOT

    @classmethod
    def of(cls, text: HeadText, least: float) -> GrowingDraft:
        """Of a text that is ready. `least`: 0 where the target has not said at which chance it verifies a token."""
        assert text.place is not None
        return cls(len(text.tokens), text.spec.stop_token_ids, text.place, least or tuning.HEAD_MIN_JOINT)

    def add(self, proposal: Proposal) -> None:
        self._put(proposal.token_id, proposal.confidence)
        last = len(self._ids) - 1
        for token_id, chance in proposal.others:
            if self.joint * chance >= tuning.MIN_CHANCE:
                self._put(token_id, chance)
        self.chain.append(proposal.token_id)
        self._last = last
        if proposal.q is not None:
            self._drawn(proposal.q)
            return
        self.joint *= proposal.confidence
        self.ended = self.joint < self.least or proposal.token_id in self.stop_token_ids

    def _drawn(self, q: DraftDistribution) -> None:
        self._q.append(q)
        if self.most is None:
            peak = max(q.counts) / Q_TOTAL
            self.most = 1 + (int(math.log(self.least) / math.log(peak)) if peak < 1 else 1 << 16)
        self.ended = len(self.chain) >= self.most

    def _put(self, token_id: int, chance: float) -> None:
        self._ids.append(token_id)
        self._parents.append(self._last)
        self._chances.append(chance)

    def tree(self, source: str) -> DraftTree:
        chain = self._parents == list(range(-1, len(self._ids) - 1))
        return DraftTree(
            self.base_len,
            tuple(self._ids),
            parents=() if chain else tuple(self._parents),
            chances=tuple(self._chances),
            q=tuple(self._q),
            source=source,
        )
