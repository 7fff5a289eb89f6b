"""What a draft has brought a request: evidence for the plan, which alone decides across requests whether it pays. Pure.

The unit is the plain round: a round that committed three tokens in the time of two plain ones saved one. Within a
request, the price of a row decides which drafted tokens are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.rounds import Round

from outrider_controller.autoscaler.evidence import Evidence


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
    step_us: float = 0.0
    """Time of a target step with this draft, as the last request measured it; 0 while unknown."""
    turnaround_us: int = 0
    """From a commit to the draft that answers it, likewise."""

    def add_rounds(self, seen: RoundSums, step_us: float) -> None:
        """`step_us`: of a plain round."""
        # The target's own drafts would come without this one too.
        saved = seen.tokens - seen.own_accepted - seen.us / max(step_us, 1.0)
        self.evidence.add_rounds(
            rounds=seen.rounds,
            tokens=seen.tokens,
            saved=saved,
            late=seen.rounds - seen.in_time,
            verified=seen.draft_verified,
            accepted=seen.accepted - seen.own_accepted,
            draft_us=seen.draft_us,
        )

    def take(self) -> Evidence:
        taken, self.evidence = self.evidence, Evidence()
        return taken


@dataclass(slots=True)
class RequestCost:
    """What one request has cost with its draft, whatever that drafts.

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
