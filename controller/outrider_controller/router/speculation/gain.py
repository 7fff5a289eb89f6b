"""Whether a draft saves time within one request, compared with plain decoding. Pure.

The unit is the plain round: a round that committed three tokens in the time of two plain ones saved one. A draft that
costs the request more than it saves is paused: the target decodes some tokens plainly, and it is tried again. The
savings of all rounds are evidence for the plan, which decides across requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.rounds import Round
from outrider.tuning import NEWEST, USUAL_TOKENS

from outrider_controller.autoscaler.evidence import Evidence
from outrider_controller.autoscaler.tuning import FIRST_SAVING
from outrider_controller.router import tuning


@dataclass(slots=True)
class RoundSums:
    """Sums over one request's rounds since the last decision."""

    rounds: int = 0
    tokens: int = 0
    in_time: int = 0
    """Rounds in which tokens of the draft were verified."""
    verified: int = 0
    accepted: int = 0
    draft_us: int = 0
    us: int = 0
    step_us: int = 0
    """Time of all their target steps."""
    draft_verified: int = 0
    """Positions at which the draft worker had a token, and the target may have had drafts of its own."""
    own_accepted: int = 0
    """Of `accepted`, drafts that the target made itself."""

    def add(self, done: Round, us: int) -> None:
        self.rounds += 1
        self.tokens += done.num_tokens
        self.verified += done.num_verified
        self.accepted += done.num_accepted
        self.draft_us += done.draft_useful_us
        self.us += us
        self.step_us += done.verify_us
        if not done.num_drafted:
            return
        drafts = [one for one in done.sources if not one.own]
        self.draft_verified += min(sum(one.num_verified for one in drafts), done.num_verified)
        self.own_accepted += sum(one.num_accepted for one in done.sources if one.own)
        self.in_time += bool(drafts)


@dataclass(slots=True)
class DraftRecord:
    """Measurements of one draft version for one tenant at one target model, shared by the requests that it serves."""

    evidence: Evidence = field(default_factory=Evidence)
    """Since it was last taken."""
    saving: float | None = None
    """Saving of recent rounds, in plain rounds per round. It shows a busy machine sooner than the plan does."""
    plain_share: float = 1.0
    """Time of a plain round with the draft paused, relative to a target step next to a busy draft."""
    measured: bool = False
    """Whether `plain_share` was measured."""
    step_us: float = 0.0
    """Time of a target step with this draft, as the last request measured it; 0 while unknown."""
    turnaround_us: int = 0
    """From a commit to the draft that answers it, likewise."""

    def add_plain_round(self, share: float) -> None:
        """Adds the time of a plain round, relative to a step next to a busy draft."""
        share = min(max(share, 0.25), 1.5)
        self.plain_share = 0.8 * self.plain_share + 0.2 * share if self.measured else share
        self.measured = True

    def take(self) -> Evidence:
        taken, self.evidence = self.evidence, Evidence()
        return taken


@dataclass(slots=True)
class RequestCost:
    """What one request has cost with its draft, whether that drafts or is paused.

    By counts and waits, not by the clock: two drafts are compared by few requests, and how long a round takes depends
    on everything else that runs.
    """

    tokens: int = 0
    rounds: int = 0
    rows: float = 0.0
    """Price of all drafted rows, in plain rounds."""
    wait_us: int = 0
    """For the draft."""
    verify_us: int = 0

    def add(self, done: Round, price: float) -> None:
        """`price`: of a drafted row."""
        self.tokens += done.num_tokens
        self.rounds += 1
        self.rows += price * done.num_drafted
        self.wait_us += done.wait_us
        self.verify_us += done.verify_us

    @property
    def plain_rounds(self) -> float:
        return self.rounds + self.rows + self.rounds * self.wait_us / max(self.verify_us, 1)


@dataclass(slots=True)
class SpeculationGain:
    """The gain of drafting in one request, and whether its draft is paused."""

    record: DraftRecord = field(default_factory=DraftRecord)
    saving: float = FIRST_SAVING
    """Of a round, in plain rounds; below 0 drafting costs more than it saves. Starts from earlier requests."""
    _pause_tokens: int = 0
    """Tokens that are left to decode plainly."""
    _step_us: float = 0.0
    """Time of a target step while the draft works."""
    _rounds: int = 0
    _num_late: int = 0
    _num_in_time: int = 0
    _num_silent: int = 0
    _num_paused: int = 0
    cost: RequestCost = field(default_factory=RequestCost)

    @property
    def paused(self) -> bool:
        return self._pause_tokens > 0

    @property
    def _mostly_late(self) -> bool:
        return self._num_late > tuning.BEGINNING * (1 + self._num_in_time)

    def begin(self, record: DraftRecord, saving: float) -> None:
        """A draft was opened, or is allowed again. `saving`: what the plan expects."""
        if record is not self.record:
            self.ended()
        self.record, self.saving = record, saving if record.saving is None else max(0.0, min(saving, record.saving))
        self._enter(0)

    def round(self, seen: RoundSums, *, draft_active: bool, may_pause: bool = True) -> None:
        """`draft_active`: the draft has answered a commit since it was opened or woken."""
        rounds, step_us = seen.rounds, seen.step_us / seen.rounds
        if self.paused:
            self._plain_rounds(seen)
        elif not draft_active:
            self._num_silent += rounds
            if self._num_silent > tuning.BEGINNING:
                self.record.evidence.missed += rounds
        elif self._in_time(seen.in_time, rounds):
            record = self.record
            faded = 0.8**rounds
            self._step_us = faded * self._step_us + (1 - faded) * step_us if self._step_us else step_us
            # The target's own drafts would come without this one too.
            saved = seen.tokens - seen.own_accepted - seen.us / (record.plain_share * (self._step_us or 1.0))
            faded = (1 - NEWEST) ** rounds
            self._rounds += rounds
            # What was expected was measured on drafts that came in time.
            expected = min(self.saving, 0.0) if self._mostly_late else self.saving
            self.saving = faded * expected + (1 - faded) * saved / rounds
            before = self.saving if record.saving is None else record.saving
            record.saving = faded * before + (1 - faded) * saved / rounds
            record.evidence.add_rounds(
                rounds=rounds,
                tokens=seen.tokens,
                saved=saved,
                late=rounds - seen.in_time,
                verified=seen.draft_verified,
                accepted=seen.accepted - seen.own_accepted,
                draft_us=seen.draft_us,
            )
            if may_pause:
                self._decide(record)

    def ended(self) -> None:
        """The request has ended, or another draft takes over: what it has cost as a whole is evidence too."""
        if self.cost.tokens:
            self.record.evidence.add_request(self.cost.tokens, self.cost.plain_rounds)
        self.cost = RequestCost()

    def _in_time(self, count: int, rounds: int) -> bool:
        """False until its first proposal was verified, while it catches up; but for BEGINNING at most."""
        self._num_in_time += count
        self._num_late += rounds - count
        return count > 0 or self._rounds > 0 or self._num_late > tuning.BEGINNING

    def _decide(self, record: DraftRecord) -> None:
        if self._rounds < tuning.PRIOR_STEPS:
            return
        if self.saving < 0:
            # To come back, the draft has to prefill what the target decodes meanwhile.
            self._enter(USUAL_TOKENS)
            # The cause, a busy machine for example, may be over at the next trial: that one starts without credit.
            self.saving = 0.0
        elif not record.measured and self.saving < FIRST_SAVING:
            # Next to a busy draft a step takes longer, and a draft that is no better than was assumed of any would get
            # credit for that.
            self._enter(tuning.BEGINNING)

    def _plain_rounds(self, seen: RoundSums) -> None:
        # The first plain round began while the draft still worked.
        if self._num_paused and self._step_us:
            self.record.add_plain_round(seen.us / seen.rounds / self._step_us)
        self._num_paused += seen.rounds
        self._pause_tokens -= seen.tokens
        if not self.paused:
            self._enter(0)

    def _enter(self, pause_tokens: int) -> None:
        self._pause_tokens = pause_tokens
        self._rounds = self._num_late = self._num_in_time = self._num_silent = self._num_paused = 0
