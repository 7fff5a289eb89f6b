"""Speculation settings of one request: draft length, longest wait. Pure; the clock is an argument.

Waiting for a draft saves steps, but does not pay when the draft takes much longer than the steps it saves. Whether a
drafted token pays is decided by the price of its row, and whether a draft does by the plan, whose evidence is `gain`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from outrider.protocol.rounds import Round
from outrider.sequence.speculation import PLAIN, Speculation, worthwhile_wait_us
from outrider.tuning import NEWEST

from outrider_controller.autoscaler.evidence import Evidence
from outrider_controller.router import tuning
from outrider_controller.router.config import PolicyConfig
from outrider_controller.router.speculation.gain import DraftRecord, RequestCost, add_round

SIZE = 200
"""Verified tokens, as the tenant's policy says."""


@dataclass(slots=True)
class Window:
    """The acceptance of the last verified tokens: below one half it is an alarm alone, below a tenant's floor the
    request decodes plainly."""

    low: bool = False
    """The window is full, and its acceptance is below one half, or below the tenant's floor where that is higher."""
    _parts: deque[tuple[int, int]] = field(default_factory=deque)
    _verified: int = 0
    _accepted: int = 0

    @property
    def acceptance(self) -> float | None:
        """None until `SIZE` tokens were verified."""
        return self._accepted / self._verified if self._verified >= SIZE else None

    def add(self, verified: int, accepted: int, floor: float | None = None) -> None:
        """Adds some rounds' tokens. `floor`: the tenant's."""
        if not verified:
            return
        self._parts.append((verified, accepted))
        self._verified += verified
        self._accepted += accepted
        while self._verified - self._parts[0][0] >= SIZE:
            old_verified, old_accepted = self._parts.popleft()
            self._verified -= old_verified
            self._accepted -= old_accepted
        acceptance = self.acceptance
        self.low = acceptance is not None and acceptance < max(tuning.ALARM, floor or 0.0)


@dataclass(frozen=True, slots=True)
class Allowance(Speculation):
    """The most that client, operators and the plan allow one request, and on what terms."""

    always_draft: bool = False
    """While it has nothing else to step, the target waits for the draft, within the limit, whether or not that pays."""
    min_acceptance: float | None = None
    """Floor on the acceptance of the last 200 verified tokens: below it the rest of the request is decoded plainly."""
    draft: str | None = None
    """The draft version to use; None: any."""


@dataclass(slots=True)
class _Times:
    """How long a target's step and a draft's answer take. Starts from other requests' times; 0 while unknown."""

    step_us: float = 0.0
    turnaround_us: int = 0
    """From a commit to the draft that answers it: the median of the last few. Some answers are on their way before."""
    answers_us: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    """The last few turnarounds of this draft for this request."""

    def stepped(self, step_us: float, rounds: int) -> None:
        kept = 0.8**rounds
        self.step_us = kept * self.step_us + (1 - kept) * step_us if self.step_us > 0 else step_us

    def forget_draft(self, turnaround_us: int) -> None:
        self.answers_us.clear()
        self.turnaround_us = turnaround_us


@dataclass(slots=True)
class _Acceptance:
    """Draft tokens accepted per step, from a prior and the steps since, with decay."""

    steps: float = tuning.PRIOR_STEPS
    accepted: float = tuning.PRIOR_STEPS

    @property
    def per_step(self) -> float:
        return self.accepted / self.steps

    def add(self, seen: Evidence) -> None:
        kept = (1 - NEWEST) ** seen.rounds
        self.steps = kept * self.steps + (1 - kept) * tuning.PRIOR_STEPS + seen.rounds - seen.late
        self.accepted = kept * self.accepted + (1 - kept) * tuning.PRIOR_STEPS + seen.accepted


@dataclass(slots=True)
class SpeculationController:
    """Measurements of one request's draft, and the setting that follows from them."""

    config: PolicyConfig
    allowed: Allowance
    workers_limit: int = 0
    """Most drafted tokens per step that both workers support; 0 without a draft."""
    unanswered: int = 0
    """Rounds in which the target waited, since the draft last sent something."""
    sent: Speculation = PLAIN
    """The setting in force."""
    record: DraftRecord = field(default_factory=DraftRecord)
    """Of its draft."""
    cost: RequestCost = field(default_factory=RequestCost)
    """With this draft."""
    window: Window = field(default_factory=Window)
    times: _Times = field(default_factory=_Times)
    acceptance: _Acceptance = field(default_factory=_Acceptance)
    _committed_us: int | None = None
    """When the last round was, since the draft was opened or allowed again."""
    _rounds: int = 0
    """Since then."""
    _begun: bool = False
    """Whether a proposal was verified since then."""
    _seen: Evidence = field(default_factory=Evidence)
    """Of the rounds since the last decision."""
    _seen_us: int = 0
    _seen_step_us: int = 0
    """What these took, and their target steps."""

    @property
    def limit(self) -> int:
        """Most drafted tokens per step."""
        return min(self.workers_limit, self.allowed.max_draft_tokens)

    def opened(self, workers_limit: int, record: DraftRecord | None = None) -> Speculation:
        """A draft was opened. The first wait follows from the times of earlier requests.

        `record` is the draft's; without it, the draft is the same as before.
        """
        self.workers_limit = workers_limit
        known = self.record if record is None else record
        self.times.step_us = self.times.step_us or known.step_us
        self._begin(known)
        self.sent = self._wanted()
        return self.sent

    def allow(self, allowed: Allowance) -> Speculation | None:
        """The allowance has changed. Returns the setting to send if it changes too."""
        was, self.allowed = self.limit, allowed
        if self.limit and not was:
            self._begin(self.record)
        if self._wanted() == self.sent:
            return None
        self.sent = self._wanted()
        return self.sent

    def _begin(self, record: DraftRecord) -> None:
        if record is not self.record:
            self.ended()
        self.record = record
        self.unanswered, self._rounds, self._begun = 0, 0, False
        self._committed_us = None
        self._forget_seen()
        self.times.forget_draft(record.turnaround_us)

    def ended(self) -> None:
        """The request has ended, or another draft takes over: what it has cost as a whole is evidence too."""
        if self.cost.tokens:
            self.record.evidence.add_request(self.cost.tokens, self.cost.plain_rounds)
        self.cost = RequestCost()

    def lost(self) -> Speculation:
        """There is no draft worker, or none any more: the target goes on alone."""
        self.workers_limit = 0
        self.sent = self._wanted()
        return self.sent

    def committed(self, done: Round, now_us: int, price: float, *, decides: bool = True) -> Speculation | None:
        """A round that was applied to the request. Returns a setting to send when it changes noticeably. `price`: of a
        drafted row.

        Without `decides` the round is only added to the sums for the next decision: to decide costs more than
        everything else in a round.
        """
        self.cost.add(done, price)
        if done.draft_active:
            self.draft_active(done.answer_us)
        if decides and self._off:
            self._committed_us = None
            return self._change()
        if self._committed_us is not None:
            add_round(self._seen, done, price)
            self._seen_us += now_us - self._committed_us
            self._seen_step_us += done.verify_us
            self.window.add(done.num_verified, done.num_accepted, self.allowed.min_acceptance)
            if decides:
                self._learn(self._seen)
                self._forget_seen()
        # Otherwise it is the first commit after an opening: its step included prefill.
        # A commit without a wait was perhaps made before the target received the setting, so it does not count.
        self.unanswered += done.wait_us > 0
        self._committed_us = now_us
        if not decides:
            return None
        return self._change()

    def _forget_seen(self) -> None:
        self._seen, self._seen_us, self._seen_step_us = Evidence(), 0, 0

    def _learn(self, seen: Evidence) -> None:
        times, record, rounds = self.times, self.record, int(seen.rounds)
        times.stepped(self._seen_step_us / rounds, rounds)
        if times.answers_us:
            times.turnaround_us = record.turnaround_us = median_low(times.answers_us)
        self._rounds += rounds
        self._begun = self._begun or seen.late < rounds
        # Until a proposal of it was verified it may still prefill, but for BEGINNING rounds at most.
        if self._begun or self._rounds > tuning.BEGINNING:
            if self._begun or times.answers_us:
                seen.took(self._seen_us / max(times.step_us, 1.0))
                record.evidence.merge(seen)
            else:
                record.evidence.missed += seen.rounds
        record.step_us = times.step_us
        self.acceptance.add(seen)

    def draft_active(self, answer_us: int) -> None:
        """The draft works: its last answer came `answer_us` after the commit, 0 where it answered nothing. The setting
        is decided with the next commit."""
        if answer_us > 0:
            self.times.answers_us.append(answer_us)
        self.unanswered = 0

    @property
    def _off(self) -> bool:
        """Draft workers are not allowed, or there is none."""
        return self._below_floor or self.limit == 0

    @property
    def _below_floor(self) -> bool:
        """Final: without drafts the window stays the same."""
        least = self.allowed.min_acceptance
        return least is not None and (acceptance := self.window.acceptance) is not None and acceptance < least

    def _wanted(self) -> Speculation:
        if self._below_floor:
            return PLAIN
        own = self.allowed.max_own_draft_tokens
        if self._off:
            return Speculation(weight=self.allowed.weight, max_own_draft_tokens=own) if own else PLAIN
        return Speculation(self.limit, self._wait_us(), self.allowed.weight, own)

    def _wait_us(self) -> int:
        if self.unanswered >= self.config.silent_commits:
            return 0
        cap_us = self.allowed.max_wait_us
        if self.allowed.always_draft:
            return cap_us
        return worthwhile_wait_us(
            cap_us=cap_us,
            accepted_per_step=self.acceptance.per_step,
            step_us=self.times.step_us,
            turnaround_us=self.times.turnaround_us,
        )

    def _change(self) -> Speculation | None:
        """The setting to send, if it differs noticeably from the last one sent."""
        wanted = self._wanted()
        if _like(wanted, self.sent):
            return None
        self.sent = wanted
        return wanted


def _like(one: Speculation, other: Speculation) -> bool:
    """Whether the difference is not worth a message."""
    mine = one.max_draft_tokens, one.max_own_draft_tokens
    theirs = other.max_draft_tokens, other.max_own_draft_tokens
    return mine == theirs and _alike(one.max_wait_us, other.max_wait_us)


def _alike(one: int, other: int) -> bool:
    """Whether they are equal, or differ by at most a quarter and neither is 0."""
    return one == other or (0 < 3 * one <= 4 * other and 3 * other <= 4 * one)
