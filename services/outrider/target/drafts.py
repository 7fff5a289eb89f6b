"""The draft buffer of one sequence: drafted tokens for the positions from its committed length on.

Only the target commits tokens. Drafts may arrive late, twice, out of order, or be invented. A draft is trimmed by the
tokens that are committed already, dropped where it does not fit, and never repaired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.speculation import DraftDistribution
from outrider.target.calibration import Bin, bin_of

# The proposal, and one message for each token that was drafted ahead.
_MAX_TREES = 12


class Arrival(NamedTuple):
    """Which message brought a token, and its bin of likelihood."""

    serial: int
    bin: Bin = Bin()
    draft_s: float = 0.0
    """Seconds that the draft spent on it."""


class Beside(NamedTuple):
    """An alternative to a drafted token."""

    at: int
    """Index of the drafted token in the buffer."""
    token_id: int
    chance: float
    """The draft's estimate that the target chooses it."""


@dataclass(frozen=True, slots=True)
class OfferedDraft:
    """One Draft message that DraftValidator lets through."""

    epoch: int
    base_len: int
    """Position of the first token; a position counts from the first prompt token."""
    token_ids: tuple[int, ...]
    q: tuple[DraftDistribution, ...] = ()
    """Ratio mode: the distribution each token was sampled from. Empty otherwise."""
    serial: int = 0
    """Number of this message, which the commit repeats; 0 when it has none."""
    received_s: float = 0.0
    """Monotonic."""
    parents: tuple[int, ...] = ()
    """In a tree, the index of each token's parent, which comes before it, or -1. Empty for a chain."""
    confidence: tuple[float, ...] = ()
    """The draft's own probability of each token, or empty."""
    source: str = ""
    """Which part of a combined drafter it is from."""
    matched: int = 0
    """Tokens of the match that it continues; 0 for a proposal of another kind."""
    share_s: float = 0.0
    """Seconds that the draft spent on it."""

    def arrivals(self, start: int) -> list[Arrival]:
        """One for each token of a chain from index `start` on."""
        draft_s = self.share_s / max(1, len(self.token_ids))
        return [Arrival(self.serial, self._bin(n), draft_s) for n in range(start, len(self.token_ids))]

    def _bin(self, number: int) -> Bin:
        return bin_of(self.source, self._confidence(number), self._matched(number), drawn=bool(self.q))

    def _confidence(self, number: int) -> float | None:
        return self.confidence[number] if number < len(self.confidence) else None

    def _matched(self, number: int) -> int:
        # If the tokens before it are right, the match is longer by them.
        return self.matched + number if self.matched else 0

    def guess(self) -> OfferedDraft:
        """The chain of first children with its probabilities; for a chain, all of it."""
        if not self.parents:
            return self
        path = self._first_children()
        token_ids = tuple(self.token_ids[n] for n in path)
        confidence = [self.confidence[n] for n in path] if len(self.confidence) == len(self.token_ids) else []
        return replace(self, token_ids=token_ids, parents=(), confidence=tuple(confidence))

    def _first_children(self) -> list[int]:
        path, node = [], -1
        for child, parent in enumerate(self.parents):
            # A parent comes before its children, so one pass finds them all.
            if parent == node:
                path.append(child)
                node = child
        return path

    def beside(self, tokens: Sequence[int], start: int) -> list[Beside] | None:
        """Alternatives to `tokens` (which begin at position base_len), from index `start` on.

        None when the first `start` tokens are no path of the tree: it can then have no alternatives in later rounds
        either.
        """
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(child)
        found, node, chance = [], -1, 1.0
        for number, token in enumerate(tokens):
            here = children.get(node, [])
            known = next((child for child in here if self.token_ids[child] == token), None)
            if number >= start:
                found += [
                    Beside(number - start, self.token_ids[child], chance * self.confidence[child])
                    for child in here
                    if child != known
                ]
                chance *= self.confidence[known] if known is not None else 0.0
            if known is None:
                return found if number >= start else None
            node = known
        return found


@dataclass(slots=True)
class DraftBuffer:
    """Drafted tokens for the positions from the committed length on, without gaps."""

    epoch: int = 0
    """Epoch of the tokens held. Epochs order the messages of one draft; another draft that takes over starts anew."""
    token_ids: list[int] = field(default_factory=list)
    q: list[DraftDistribution] = field(default_factory=list)
    """One per token in ratio mode, else empty."""
    arrivals: list[Arrival] = field(default_factory=list)
    """One per token."""
    num_dropped: int = 0
    """Drafted tokens dropped since the last commit."""
    declined_len: int = -1
    """The committed length for which a draft last sent an empty proposal."""
    active: bool = False
    """Whether a draft has answered since drafting was allowed. Before, it may prefill a long prompt: do not wait."""
    trees: deque[OfferedDraft] = field(default_factory=lambda: deque(maxlen=_MAX_TREES))
    """The last trees offered: the source of alternatives to the buffered tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def offer(self, draft: OfferedDraft, committed: Sequence[int], capacity: int) -> None:
        """Buffers the tokens of `draft` that fit and counts the others. Keeps at most `capacity` tokens."""
        # A message that comes after drafting was disallowed was sent before the draft knew.
        self.active |= capacity > 0
        if not draft.token_ids:
            self.declined_len = max(self.declined_len, min(draft.base_len, len(committed)))
            return
        if self.token_ids and draft.epoch < self.epoch:
            self.num_dropped += len(draft.guess().token_ids)
            return
        if draft.epoch > self.epoch:
            # The draft has withdrawn its earlier tokens.
            self.cut(0)
            self.trees.clear()
        if draft.parents and len(draft.confidence) == len(draft.token_ids):
            self.trees.append(draft)
        self._append(draft.guess(), committed, capacity)

    def has_answer(self, committed_len: int) -> bool:
        """Whether a draft has answered the last commit, with tokens or with none."""
        return bool(self.token_ids) or self.declined_len >= committed_len

    def continued_by(self, draft: OfferedDraft, committed: Sequence[int]) -> bool:
        """Whether `draft` continues the buffered tokens and withdraws none. It may overlap them."""
        if draft.parents or (self.token_ids and draft.epoch != self.epoch):
            return False
        num_known = self._num_known(draft, committed)
        return num_known is not None and num_known < len(draft.token_ids)

    def _num_known(self, draft: OfferedDraft, committed: Sequence[int]) -> int | None:
        """How many of its tokens are committed or buffered already. None when it does not continue those."""
        ahead = max(0, draft.base_len - len(committed))
        known = [*committed[draft.base_len :], *self.token_ids[ahead:]]
        overlap = len(committed) + len(self.token_ids) - draft.base_len
        if overlap < 0 or list(draft.token_ids[:overlap]) != known[: len(draft.token_ids)]:
            return None
        return overlap

    def beside(self, committed: Sequence[int], count: int) -> list[Beside]:
        """Alternatives to the first `count` buffered tokens."""
        found = {}
        for tree in list(self.trees):
            start = len(committed) - tree.base_len
            if start < 0:
                continue
            # No path is longer than the tree has tokens.
            path = [*committed[tree.base_len :], *self.token_ids[:count]] if start <= len(tree.token_ids) else []
            if (beside := tree.beside(path, start) if path else None) is None:
                self.trees.remove(tree)
                continue
            for one in beside:
                found[one.at, one.token_id] = one
        return list(found.values())

    def _append(self, draft: OfferedDraft, committed: Sequence[int], capacity: int) -> None:
        num_known = self._num_known(draft, committed)
        if num_known is None:
            self.num_dropped += len(draft.token_ids)
            return
        self.epoch = draft.epoch
        self.token_ids.extend(draft.token_ids[num_known:])
        self.q.extend(draft.q[num_known:])
        self.arrivals.extend(draft.arrivals(num_known))
        self.cut(capacity)

    def advance(self, committed: Sequence[int], num_in_step: int) -> None:
        """Follows a commit of `committed`, in which the first `num_in_step` tokens of the buffer were verified.

        When the committed tokens equal the first buffered ones, the rest stays valid, also after a token that was not
        verified but decoded plainly. Otherwise all is dropped, and the tokens that were not verified are counted.
        """
        count = len(committed)
        if self.token_ids[:count] == list(committed):
            del self.token_ids[:count]
            del self.q[:count]
            del self.arrivals[:count]
            return
        self.num_dropped += max(0, len(self.token_ids) - num_in_step)
        self.token_ids.clear()
        self.q.clear()
        self.arrivals.clear()

    def cut(self, length: int) -> None:
        """Drops the tokens beyond the first `length`, and counts them."""
        self.num_dropped += max(0, len(self.token_ids) - length)
        del self.token_ids[length:]
        del self.q[length:]
        del self.arrivals[length:]

    def limit(self, capacity: int) -> None:
        """Follows a new capacity; 0 when drafting is no longer allowed."""
        self.cut(capacity)
        self.active &= capacity > 0

    def take_num_dropped(self) -> int:
        count, self.num_dropped = self.num_dropped, 0
        return count
