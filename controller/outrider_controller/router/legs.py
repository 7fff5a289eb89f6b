"""Where the time between two commits of one request went. Pure.

Only durations are combined: of this router's clock, and as a worker measured them by its own. What a message spent on
its way is a round trip as seen from here less the time that the worker had it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider.rpc.v1 import sequence_pb2 as sequence

from outrider_controller.router.round import Round

_MAX_US = 2**32 - 1


@dataclass(slots=True, eq=False)
class _Forwarded:
    """A draft on its way to the target."""

    serial: int
    epoch: int
    base_len: int
    end: int
    at_us: int
    draft_us: int
    compute_us: int
    wire_us: int
    """Commit to draft worker and draft back."""
    source: str


@dataclass(slots=True)
class Legs:
    """The messages of one request that are under way. Times are of the router's monotonic clock."""

    opened_us: int
    """When the sequence was opened on the target it is on."""
    _committed_us: int = 0
    _serial: int = 0
    _fresh: bool = True
    """The target has committed nothing since it was opened."""
    _asked: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=8))
    """Committed length and time of what the draft was told last: which one it answers is told by where it begins."""
    _drafts: list[_Forwarded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._committed_us = self.opened_us

    def opened(self, now_us: int) -> None:
        """The sequence was opened on another target, which counts drafts anew."""
        self.opened_us, self._serial, self._fresh = now_us, 0, True
        self._drafts.clear()

    def asked(self, committed_len: int, now_us: int) -> None:
        """The draft was told of the tokens below `committed_len`: by an opening or a commit."""
        self._asked.append((committed_len, now_us))

    def forward(self, draft: sequence.Draft, base_len: int, num_tokens: int, now_us: int) -> None:
        """Numbers a draft that goes to the target, and remembers it for the round that will judge it."""
        self._serial = serial = self._serial + 1
        draft.serial = serial
        if not num_tokens:
            return
        draft_us = draft.draft_us
        self._drafts.append(
            _Forwarded(
                serial,
                draft.epoch,
                base_len,
                base_len + num_tokens,
                now_us,
                draft_us,
                draft.compute_us,
                0 if draft.run_ahead else self._draft_wire_us(base_len, draft_us, now_us),
                draft.source,
            )
        )

    def commit(self, done: Round, *, committed_len: int, now_us: int) -> None:
        """Adds the times of the round that has ended; `committed_len` is the length after it."""
        drafts = self._drafts
        judged = self._judged(done) if drafts and done.num_drafted else []
        last: _Forwarded | None = None
        draft_us = compute_us = answer_us = 0
        if judged:
            for draft in judged:
                draft_us += draft.draft_us
                compute_us += draft.compute_us
                answer_us = draft.wire_us or answer_us
            done.draft_us = _clamp(draft_us)
            done.compute_us = _clamp(compute_us)
            done.source = draft.source
            if draft.serial == done.draft_serial:
                last = draft
        done.round_us = _clamp(now_us - self._committed_us)
        if last is not None or self._fresh:
            answer_us += self._target_wire_us(done, last, now_us)
        done.wire_us = _clamp(answer_us)
        if drafts:
            # A draft is charged to the first round that judged a part of it.
            self._drafts = [d for d in drafts if d.end > committed_len and d not in judged]
        self._committed_us, self._fresh = now_us, False

    def _judged(self, done: Round) -> list[_Forwarded]:
        """What brought the drafted tokens of this round, in order of forwarding."""
        base_len, serial = done.base_len, done.draft_serial
        end = base_len + done.num_drafted
        overlapping = [d for d in self._drafts if d.base_len < end and d.end > base_len]
        if len(overlapping) == 1 and overlapping[0].serial == serial:
            return overlapping
        last = next((d for d in self._drafts if d.serial == serial), None)
        if last is None:
            return overlapping
        return [d for d in overlapping if d.serial <= serial and d.epoch == last.epoch]

    def _draft_wire_us(self, base_len: int, draft_us: int, now_us: int) -> int:
        for committed_len, asked_us in reversed(self._asked):
            if committed_len == base_len:
                return max(0, now_us - asked_us - draft_us)
        return 0

    def _target_wire_us(self, done: Round, last: _Forwarded | None, now_us: int) -> int:
        if last is not None:
            return max(0, now_us - last.at_us - done.draft_queue_us - done.verify_us)
        return max(0, now_us - self.opened_us - done.queue_us - done.prefill_us - done.verify_us)


def _clamp(value_us: int) -> int:
    return value_us if 0 <= value_us <= _MAX_US else max(0, min(value_us, _MAX_US))
