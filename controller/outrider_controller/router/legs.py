"""Where the time between two commits of one request went. Pure.

Only durations are combined: of this router's clock, and as a worker measured them by its own. What a message spent on
its way is a round trip as seen from here less the time that the worker had it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.draft_log import DraftLog, SentDraft, clamp_us, drafted_us
from outrider.protocol.rounds import Round
from outrider.rpc.v1 import sequence_pb2 as sequence


@dataclass(slots=True)
class Legs:
    """The messages of one request that are under way. Times are of the router's monotonic clock."""

    opened_us: int
    """When the sequence was opened on the target it is on."""
    _committed_us: int = 0
    _fresh: bool = True
    """The target has committed nothing since it was opened."""
    _log: DraftLog = field(default_factory=DraftLog)

    def __post_init__(self) -> None:
        self._committed_us = self.opened_us

    def opened(self, now_us: int) -> None:
        """The sequence was opened on another target."""
        self.opened_us, self._fresh = now_us, True
        self._log.clear()

    def asked(self, committed_len: int, now_us: int) -> None:
        """The draft was told of the tokens below `committed_len`: by an opening or a commit."""
        self._log.asked(committed_len, now_us)

    def forward(self, draft: sequence.Draft, base_len: int, num_tokens: int, now_us: int) -> None:
        """Numbers a draft that goes to the target, and remembers it for the round that will judge it."""
        self._log.number(draft)
        self._log.add(draft, base_len, num_tokens, now_us)

    def commit(self, done: Round, *, committed_len: int, now_us: int) -> None:
        """Adds the times of the round that has ended; `committed_len` is the length after it.

        Where the target talks to the draft itself, it has said of the drafts what is to be known.
        """
        done.round_us = clamp_us(now_us - self._committed_us)
        if self._log.waits or self._fresh:
            self._add_wire(done, committed_len, now_us)
        self._committed_us, self._fresh = now_us, False

    def _add_wire(self, done: Round, committed_len: int, now_us: int) -> None:
        judged = self._log.take_judged(done.base_len, done.num_drafted, done.draft_serial, committed_len)
        last: SentDraft | None = None
        if judged:
            done.draft_us, done.compute_us, done.wire_us = drafted_us(judged)
            done.source = judged[-1].source
            if judged[-1].serial == done.draft_serial:
                last = judged[-1]
        if last is not None or self._fresh:
            done.wire_us = clamp_us(done.wire_us + self._target_wire_us(done, last, now_us))

    def _target_wire_us(self, done: Round, last: SentDraft | None, now_us: int) -> int:
        if last is not None:
            return max(0, now_us - last.at_us - done.draft_queue_us - done.verify_us)
        return max(0, now_us - self.opened_us - done.queue_us - done.prefill_us - done.verify_us)
