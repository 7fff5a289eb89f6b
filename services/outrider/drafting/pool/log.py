"""Drafts that wait for verification: which of them a round verified, and what their drafting took. Pure.

The target keeps one log for each sequence that it has opened at a draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.tree import DraftTree
from outrider.protocol.limits import clamp_us
from outrider.rpc.v1 import sequence_pb2 as sequence

# Drafts not yet verified that are remembered. Between two commits a draft should never send more.
_MAX_SENT = 256


@dataclass(slots=True, eq=False)
class _Sent:
    serial: int
    epoch: int
    base_len: int
    end: int
    at_us: int
    """When it was passed to the worker."""
    draft_us: int
    compute_us: int
    wire_us: int
    """Network time: of the commit to the draft worker and of the draft back."""
    source: str


@dataclass(slots=True)
class DraftLog:
    """The log of one opening of one sequence at a draft."""

    _serial: int = 0
    _asked: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=8))
    """Committed length and time of the last openings and commits sent; a draft answers the one at its base_len."""
    _sent: list[_Sent] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return bool(self._sent)

    def asked(self, committed_len: int, now_us: int) -> None:
        """The draft was sent the tokens below `committed_len`, in an opening or a commit."""
        self._asked.append((committed_len, now_us))

    def number(self, draft: sequence.Draft) -> None:
        """Numbers the draft 1, 2, …; a commit refers to it by this number."""
        self._serial += 1
        draft.serial = self._serial

    def add(self, draft: sequence.Draft, tree: DraftTree, now_us: int) -> int:
        """Remembers a numbered draft for the round that will verify it.

        Returns how many µs ago the commit that it answers was sent; 0 if it answers none, or that is forgotten.
        """
        answer_us = self._since_asked_us(tree.base_len, now_us)
        if tree.token_ids:
            wire_us = max(0, answer_us - draft.draft_us)
            end = tree.base_len + tree.depth
            del self._sent[: -_MAX_SENT + 1]
            self._sent.append(
                _Sent(
                    *(tree.serial, tree.epoch, tree.base_len, end, now_us, draft.draft_us, draft.compute_us, wire_us),
                    tree.source,
                )
            )
        return answer_us

    def take_verified(self, base_len: int, num_drafted: int, serial: int, committed_len: int) -> list[_Sent]:
        """The messages that brought the drafted tokens of a round, in order. `serial`: number of the last of them.

        A draft is charged to the first round that verified a part of it. Drafts that the commit has passed are
        forgotten.
        """
        verified = self._verified(base_len, base_len + num_drafted, serial) if num_drafted else []
        self._sent = [sent for sent in self._sent if sent.end > committed_len and sent not in verified]
        return verified

    def _since_asked_us(self, base_len: int, now_us: int) -> int:
        for committed_len, asked_us in reversed(self._asked):
            if committed_len == base_len:
                return now_us - asked_us
        return 0

    def _verified(self, base_len: int, end: int, serial: int) -> list[_Sent]:
        overlapping = [sent for sent in self._sent if sent.base_len < end and sent.end > base_len]
        if len(overlapping) == 1 and overlapping[0].serial == serial:
            return overlapping
        last = next((sent for sent in self._sent if sent.serial == serial), None)
        if last is None:
            return overlapping
        return [sent for sent in overlapping if sent.serial <= serial and sent.epoch == last.epoch]


def drafted_us(verified: Sequence[_Sent]) -> tuple[int, int, int]:
    """Total draft time, the compute part of it, and the network time of the last answer, in µs. Each fits a message."""
    draft_us = compute_us = wire_us = 0
    for sent in verified:
        draft_us += sent.draft_us
        compute_us += sent.compute_us
        wire_us = sent.wire_us or wire_us
    return clamp_us(draft_us), clamp_us(compute_us), clamp_us(wire_us)
