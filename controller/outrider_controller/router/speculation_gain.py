"""Whether a draft pays within one request, in time: what a round brought against what plain decoding brings. Pure.

Counted in plain rounds: a round that committed three tokens and took as long as two plain ones saved one. While a draft
costs the request more than it saves it rests there, and the target decodes plainly; then it is tried again, after twice
as many tokens each time that it fails. What each round saved is evidence for the plan, which decides across requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.rounds import Round

from outrider_controller.autoscaler.evidence import Evidence

# In mid-request a draft that has rested must read again all there is, beside a target that is decoding.
FIRST_REST_TOKENS = 128
LONGEST_REST_TOKENS = 512
MEASURING_TOKENS = 8
"""Committed plainly to see what a plain round takes."""
_MIN_ROUNDS = 3
"""Of a trial, before it can fail."""
# What was known before counts as much as so many rounds: a few unlucky ones do not condemn a draft that has paid.
_KNOWN_ROUNDS = 24.0
# Forgetting per round: of what this request has shown, and of what was known before.
_KEEP = 0.93
_KEEP_KNOWN = 0.975
# A saving smaller than this is not believed before a plain round was measured with the draft at rest. Beside a busy one
# it takes longer, most of all where both share a memory, and the draft would be credited with that.
_CLEAR_SAVING = 0.35
_MEASURE_AFTER_ROUNDS = 6
# Rounds after which a draft that is never in time counts for what it costs the target.
_MAX_LATE_ROUNDS = 8


@dataclass(slots=True)
class RoundSums:
    """Of one request's rounds since the last decision."""

    rounds: int = 0
    tokens: int = 0
    in_time: int = 0
    """Rounds in which drafts were verified."""
    verified: int = 0
    accepted: int = 0
    draft_us: int = 0
    us: int = 0
    step_us: int = 0
    """Of all their steps."""

    def add(self, done: Round, us: int) -> None:
        self.rounds += 1
        self.tokens += len(done.token_ids)
        self.verified += done.num_verified
        self.accepted += done.num_accepted
        self.draft_us += done.draft_useful_us
        self.us += us
        self.step_us += done.verify_us
        if done.num_drafted:
            self.in_time += 1


@dataclass(slots=True)
class DraftRecord:
    """What one version of a draft has shown to one tenant at one target: shared by the requests that it serves."""

    evidence: Evidence = field(default_factory=Evidence)
    """Since it was last taken."""
    saving: float | None = None
    """Of a round of late, in plain rounds: the plan takes longer to see a busy machine."""
    plain_share: float = 1.0
    """A plain round with the draft at rest, in steps beside a busy draft."""
    measured: bool = False
    """Whether that was ever seen."""
    step_us: float = 0.0
    """Of the target's steps beside it, as a request saw them last; 0 while unknown."""
    turnaround_us: int = 0
    """From a commit to the draft that answers it, likewise."""

    def rested(self, share: float) -> None:
        """One plain round, in steps beside a busy draft."""
        share = min(max(share, 0.25), 1.5)
        self.plain_share = 0.8 * self.plain_share + 0.2 * share if self.measured else share
        self.measured = True

    def take(self) -> Evidence:
        taken, self.evidence = self.evidence, Evidence()
        return taken


@dataclass(slots=True)
class SpeculationGain:
    """One request's view of it."""

    record: DraftRecord = field(default_factory=DraftRecord)
    known: float = 0.5
    """Saving of a round as it was believed before this request, in plain rounds."""
    resting: bool = False
    _rest_tokens: int = FIRST_REST_TOKENS
    """How long it rests when it fails the next time."""
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
        return (known * self.known + self._saved) / max(known + self._rounds, 1.0)

    @property
    def _mostly_late(self) -> bool:
        return self._num_late > _MAX_LATE_ROUNDS * (1 + self._num_in_time)

    def begin(self, record: DraftRecord, known: float) -> None:
        """A draft was opened, or is allowed again."""
        self.record, self.known = record, known if record.saving is None else max(0.0, min(known, record.saving))
        self._rest_tokens = FIRST_REST_TOKENS
        self._enter(resting=False)

    def round(self, seen: RoundSums, *, draft_active: bool, may_rest: bool = True) -> None:
        """`draft_active`: the draft is at work, not still busy with the prompt."""
        rounds, step_us = seen.rounds, seen.step_us / seen.rounds
        if self.resting:
            self._rested(seen)
        elif draft_active and self._in_time(seen.in_time, rounds):
            record = self.record
            faded = 0.8**rounds
            self._step_us = faded * self._step_us + (1 - faded) * step_us if self._step_us else step_us
            saved = seen.tokens - seen.us / (record.plain_share * (self._step_us or 1.0))
            faded = _KEEP**rounds
            self._rounds = faded * self._rounds + rounds
            self._saved = faded * self._saved + saved
            faded = _KEEP_KNOWN**rounds
            self.known = faded * self.known + (1 - faded) * saved / rounds
            before = self.known if record.saving is None else record.saving
            record.saving = faded * before + (1 - faded) * saved / rounds
            record.evidence.add_rounds(
                rounds=rounds,
                tokens=seen.tokens,
                saved=saved,
                late=rounds - seen.in_time,
                verified=seen.verified,
                accepted=seen.accepted,
                draft_us=seen.draft_us,
            )
            if may_rest:
                self._decide(record)

    def _in_time(self, count: int, rounds: int) -> bool:
        """False until its first draft was verified: it has yet to catch up. Unless it never does."""
        self._num_in_time += count
        self._num_late += rounds - count
        return count > 0 or self._rounds > 0 or self._num_late > _MAX_LATE_ROUNDS

    def _decide(self, record: DraftRecord) -> None:
        if self._rounds <= _MIN_ROUNDS - 1:
            return
        saving = self.saving
        if saving < 0:
            self._enter(resting=True)
            # What it failed for may be over when it is tried again, a busy machine for one: that trial counts by
            # itself.
            self.known = 0.0
        elif not record.measured and saving < _CLEAR_SAVING and self._rounds > _MEASURE_AFTER_ROUNDS - 1:
            self._enter(resting=True)
            self._measuring = True
        else:
            self._rest_tokens = FIRST_REST_TOKENS

    def _rested(self, seen: RoundSums) -> None:
        # The first such round began with the draft at work.
        if self._num_rested and self._step_us:
            self.record.rested(seen.us / seen.rounds / self._step_us)
        self._num_rested += seen.rounds
        self._tokens_rested += seen.tokens
        if self._tokens_rested >= (MEASURING_TOKENS if self._measuring else self._rest_tokens):
            if not self._measuring:
                self._rest_tokens = min(2 * self._rest_tokens, LONGEST_REST_TOKENS)
            self._enter(resting=False)

    def _enter(self, *, resting: bool) -> None:
        self.resting = resting
        self._rounds = self._saved = 0.0
        self._num_late = self._num_in_time = self._num_rested = self._tokens_rested = 0
        self._measuring = False
