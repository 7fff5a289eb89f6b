"""What a draft has brought a request: evidence for the plan, which alone decides across requests whether it pays. Pure.

Within a request, the price of a row decides which drafted tokens are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.rounds import Round

from outrider_controller.autoscaler.evidence import Evidence


def add_round(seen: Evidence, done: Round, price: float) -> None:
    """What a round saved, before what it took is known: its tokens, less the price of the draft's rows, because these
    make the step longer for all of its sequences."""
    drafts = [one for one in done.sources if not one.own]
    # In time, though the step took nothing of it: to wait for more such answers would save nothing either.
    answered = 0 < done.answer_us <= done.queue_us
    own_accepted = sum(one.num_accepted for one in done.sources if one.own)
    seen.add_rounds(
        rounds=1,
        tokens=done.num_tokens,
        saved=done.num_tokens - price * sum(one.num_drafted for one in drafts),
        late=not (drafts or answered),
        verified=min(sum(one.num_verified for one in drafts), done.num_verified),
        accepted=done.num_accepted - own_accepted,
        draft_us=done.draft_useful_us,
    )


@dataclass(slots=True)
class DraftRecord:
    """Measurements of one draft version for one tenant at one target model, shared by the requests that it serves."""

    evidence: Evidence = field(default_factory=Evidence)
    """Since it was last taken."""
    step_us: float = 0.0
    """Time of a target step with this draft, as the last request measured it; 0 while unknown."""
    turnaround_us: int = 0
    """From a commit to the draft that answers it, likewise."""

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
