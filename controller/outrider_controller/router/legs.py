"""Where the time between two commits of one request went. Pure.

Only durations are combined: of this router's clock, and as a worker measured them by its own. What a message spent on
its way is a round trip as seen from here less the time that the worker had it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence

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
    source: str = ""
    """Which part of the drafter proposed what the last commit judged."""
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

    def forward(self, draft: sequence.Draft, now_us: int) -> None:
        """Numbers a draft that goes to the target, and remembers it for the round that will judge it."""
        self._serial += 1
        draft.serial = self._serial
        num_tokens = len(draft.token_ids)
        if not num_tokens:
            return
        base_len = draft.base_len
        self._drafts.append(
            _Forwarded(
                serial=self._serial,
                epoch=draft.epoch,
                base_len=base_len,
                end=base_len + num_tokens,
                at_us=now_us,
                draft_us=draft.draft_us,
                compute_us=draft.compute_us,
                wire_us=self._draft_wire_us(draft, now_us),
                source=draft.source,
            )
        )

    def commit(self, commit: sequence.Commit, *, committed_len: int, step_us: int, now_us: int) -> router.RoundTiming:
        """The times of the round that ends with `commit`; `committed_len` is the length after it."""
        judged = self._judged(commit) if commit.num_drafted else []
        last = judged[-1] if judged and judged[-1].serial == commit.draft_serial else None
        wire_us = self._target_wire_us(commit, last, step_us, now_us)
        draft_us = compute_us = answer_us = 0
        for draft in judged:
            draft_us += draft.draft_us
            compute_us += draft.compute_us
            answer_us = draft.wire_us or answer_us
        queue_us = commit.queue_us
        timing = router.RoundTiming(
            round_us=_clamp(now_us - self._committed_us),
            draft_us=_clamp(draft_us),
            verify_us=step_us,
            queue_us=queue_us,
            wait_us=min(commit.wait_us, queue_us),
            prefill_us=commit.prefill_us,
            compute_us=_clamp(compute_us),
            wire_us=_clamp(wire_us + answer_us),
        )
        if self._drafts:
            # A draft is charged to the first round that judged a part of it.
            self._drafts = [d for d in self._drafts if d.end > committed_len and d not in judged]
        self._committed_us, self._fresh = now_us, False
        self.source = judged[-1].source if judged else ""
        return timing

    def _judged(self, commit: sequence.Commit) -> list[_Forwarded]:
        """What brought the drafted tokens of this commit, in order of forwarding."""
        base_len, draft_serial = commit.base_len, commit.draft_serial
        end = base_len + commit.num_drafted
        last = next((d for d in self._drafts if d.serial == draft_serial), None)
        return [
            d
            for d in self._drafts
            if d.base_len < end
            and d.end > base_len
            and (last is None or (d.serial <= last.serial and d.epoch == last.epoch))
        ]

    def _draft_wire_us(self, draft: sequence.Draft, now_us: int) -> int:
        if draft.run_ahead:
            return 0
        base_len = draft.base_len
        for committed_len, asked_us in reversed(self._asked):
            if committed_len == base_len:
                return max(0, now_us - asked_us - draft.draft_us)
        return 0

    def _target_wire_us(self, commit: sequence.Commit, last: _Forwarded | None, step_us: int, now_us: int) -> int:
        if last is not None:
            return max(0, now_us - last.at_us - commit.draft_queue_us - step_us)
        if self._fresh:
            return max(0, now_us - self.opened_us - commit.queue_us - commit.prefill_us - step_us)
        return 0


def _clamp(value_us: int) -> int:
    return value_us if 0 <= value_us <= _MAX_US else max(0, min(value_us, _MAX_US))
