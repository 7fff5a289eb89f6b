"""Whether a draft pays, told by time: what a round brought against what plain decoding brings meanwhile. Pure.

Counted in plain rounds: a round that committed three tokens and took as long as two plain ones saved one. While a draft
costs one request more than it saves it rests there, and the target decodes plainly. Where it costs a tenant's requests
more than it saves them, all of it rests. Then it is tried again, after twice as many tokens each time that it fails: as
a request starts, when it reads the prompt while the target does, or late in a long one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_controller.router.run_ahead import LookaheadGain

FIRST_REST_TOKENS = 64
LONGEST_REST_TOKENS = 512
MEASURING_TOKENS = 8
"""Committed plainly to see what a plain round takes."""
# In mid-request a draft that has rested must read again all there is, beside a target that is decoding.
_MIN_REST_WITHIN_TOKENS = 128
_MIN_ROUNDS = 3
"""Of a trial, before it can fail."""
# What was known before counts as much as so many rounds: a few unlucky ones do not condemn a draft that has paid.
_KNOWN_ROUNDS = 24.0
_FIRST_SAVING = 0.5
# Forgetting per round, within a request and from request to request.
_KEEP = 0.93
_KEEP_KNOWN = 0.975
# A saving smaller than this is not believed before a plain round was measured with the draft at rest. Beside a busy one
# it takes longer, most of all where both share a memory, and the draft would be credited with that.
_CLEAR_SAVING = 0.35
_MEASURE_AFTER_ROUNDS = 6
# Rounds after which a draft that is never in time counts for what it costs the target.
_MAX_LATE_ROUNDS = 8


@dataclass(slots=True)
class DraftRecord:
    """What one draft worker has shown to one tenant: shared by the requests that it serves."""

    saving: float = _FIRST_SAVING
    """Of a round with it, in plain rounds."""
    plain_share: float = 1.0
    """A plain round with the draft at rest, in steps beside a busy draft."""
    measured: bool = False
    """Whether that was ever seen."""
    rest_tokens: int = FIRST_REST_TOKENS
    """How long it rests when it fails the next time."""
    left: int = 0
    """Tokens to be committed plainly, by whichever requests, before one of them tries it again."""
    step_us: float = 0.0
    """Of the target's steps beside it, as a request saw them last; 0 while unknown."""
    turnaround_us: int = 0
    """From a commit to the draft that answers it, likewise."""
    lookahead: LookaheadGain = field(default_factory=LookaheadGain)

    @property
    def doubtful(self) -> bool:
        return self.rest_tokens > FIRST_REST_TOKENS

    def rested(self, share: float) -> None:
        """One plain round, in steps beside a busy draft."""
        share = min(max(share, 0.25), 1.5)
        self.plain_share = 0.8 * self.plain_share + 0.2 * share if self.measured else share
        self.measured = True

    def failed(self) -> None:
        # What it failed for may be over when it is tried again, a busy machine for one: that trial is judged by itself.
        self.saving = 0.0
        self.left = self.rest_tokens
        self.rest_tokens = min(2 * self.rest_tokens, LONGEST_REST_TOKENS)

    def paid(self) -> None:
        self.left, self.rest_tokens = 0, FIRST_REST_TOKENS


@dataclass(slots=True)
class SpeculationGain:
    """One request's view of it."""

    record: DraftRecord = field(default_factory=DraftRecord)
    resting: bool = False
    _step_us: float = 0.0
    """With the draft at work."""
    _rounds: float = 0.0
    _saved: float = 0.0
    _num_late: int = 0
    _num_in_time: int = 0
    _num_rested: int = 0
    _tokens_rested: int = 0
    _measuring: bool = False

    @property
    def saving(self) -> float:
        """Of a round, in plain rounds; below 0 it costs more than it brings."""
        # What was known is of drafts that came in time.
        known = 0.0 if self._mostly_late else _KNOWN_ROUNDS
        return (known * self.record.saving + self._saved) / max(known + self._rounds, 1.0)

    @property
    def _mostly_late(self) -> bool:
        return self._num_late > _MAX_LATE_ROUNDS * (1 + self._num_in_time)

    def begin(self, record: DraftRecord) -> None:
        """A draft was opened."""
        self.record = record
        self._enter(resting=record.left > 0)
        if not self.resting:
            self._try()

    def round(
        self, *, num_tokens: int, num_in_time: int, round_us: int, step_us: float, draft_active: bool, rounds: int = 1
    ) -> None:
        """Some rounds: their tokens, in how many of them drafts were judged, their time, and that of one's step.

        `draft_active`: the draft is at work, not still busy with the prompt.
        """
        if self.resting:
            self._rested(num_tokens, round_us, rounds)
        elif draft_active and self._in_time(num_in_time, rounds):
            record = self.record
            faded = 0.8**rounds
            self._step_us = faded * self._step_us + (1 - faded) * step_us if self._step_us else float(step_us)
            saved = num_tokens - round_us / (record.plain_share * (self._step_us or 1.0))
            faded = _KEEP**rounds
            self._rounds = faded * self._rounds + rounds
            self._saved = faded * self._saved + saved
            faded = _KEEP_KNOWN**rounds
            record.saving = faded * record.saving + (1 - faded) * saved / rounds
            self._decide(record)

    def _in_time(self, count: int, rounds: int) -> bool:
        """False until its first draft was judged: it has yet to catch up. Unless it never does."""
        self._num_in_time += count
        self._num_late += rounds - count
        return count > 0 or self._rounds > 0 or self._num_late > _MAX_LATE_ROUNDS

    def _decide(self, record: DraftRecord) -> None:
        if self._rounds <= _MIN_ROUNDS - 1:
            return
        saving = self.saving
        if saving < 0:
            # A text that the draft cannot guess says little of the next one.
            if record.saving < 0 or self._mostly_late:
                record.failed()
            self._enter(resting=True)
        elif not record.measured and saving < _CLEAR_SAVING and self._rounds > _MEASURE_AFTER_ROUNDS - 1:
            self._enter(resting=True)
            self._measuring = True
        else:
            record.paid()

    def _try(self) -> None:
        """This request tries it; the others wait for what comes of that."""
        if self.record.doubtful:
            self.record.left = self.record.rest_tokens

    def _rested(self, num_tokens: int, round_us: int, rounds: int) -> None:
        # The first such round began with the draft at work.
        if self._num_rested and self._step_us:
            self.record.rested(round_us / rounds / self._step_us)
        self._num_rested += rounds
        self._tokens_rested += num_tokens
        if self._measuring:
            if self._tokens_rested >= MEASURING_TOKENS:
                self._enter(resting=False)
            return
        self.record.left -= num_tokens
        if self.record.left <= 0 and self._tokens_rested >= _MIN_REST_WITHIN_TOKENS:
            self._enter(resting=False)
            self._try()

    def _enter(self, *, resting: bool) -> None:
        self.resting = resting
        self._rounds = self._saved = 0.0
        self._num_late = self._num_in_time = self._num_rested = self._tokens_rested = 0
        self._measuring = False
