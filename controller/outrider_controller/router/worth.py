"""Whether a draft pays, told by time: tokens a second with it against tokens a second without. Pure.

While it does not, it rests and the target decodes plainly, which shows what that takes. Then it is tried again, after
twice as many tokens each time that it fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_REST_TOKENS = 8
LONGEST_REST_TOKENS = 512
# Rounds before a verdict; fewer for one that has failed before, and for a loss like this.
_TRIAL_ROUNDS = 6
_NEXT_TRIAL_ROUNDS = 4
_HEAVY_LOSS_ROUNDS = 2
_HEAVY_LOSS = 0.65
# Below this gain a plain step has to be measured with the draft at rest: beside a busy one it takes longer, most of all
# where both share a memory, and the draft would be credited with it.
_CLEAR_GAIN = 1.25
# Forgetting per round: half of the evidence is replaced in about 10.
_KEEP = 0.93


@dataclass(slots=True)
class Standing:
    """What one draft worker has shown to one tenant: shared by the requests that it serves."""

    rest_tokens: int = FIRST_REST_TOKENS
    """How long it rests when it fails the next time."""
    left: int = 0
    """Tokens to be committed plainly, by whichever requests, before one of them tries it again."""

    @property
    def doubtful(self) -> bool:
        return self.rest_tokens > FIRST_REST_TOKENS

    def failed(self) -> None:
        self.left = self.rest_tokens
        self.rest_tokens = min(2 * self.rest_tokens, LONGEST_REST_TOKENS)

    def paid(self) -> None:
        self.left, self.rest_tokens = 0, FIRST_REST_TOKENS


@dataclass(slots=True)
class Worth:
    """One request's comparison of the two."""

    standing: Standing = field(default_factory=Standing)
    resting: bool = False
    plain_us: float = 0.0
    """A plain round; 0 while unknown."""
    _num_rested: int = 0
    """Rounds that measured it with the draft at rest."""
    _rounds: float = 0.0
    _tokens: float = 0.0
    _us: float = 0.0

    @property
    def gain(self) -> float:
        """Speed with the draft over speed without; 1 while unknown."""
        return self._tokens * self.plain_us / self._us if self._us and self.plain_us else 1.0

    def begin(self, standing: Standing) -> None:
        """A draft was opened."""
        self.standing = standing
        self.resting = standing.left > 0
        self._forget()

    def round(self, *, num_tokens: int, num_drafted: int, round_us: int, step_us: int, spoken: bool) -> None:
        """One round. `spoken`: the draft is at work, not still busy with the prompt."""
        if self.resting:
            self._rested(num_tokens, round_us)
            return
        if not num_drafted and not self._num_rested:
            self.plain_us = _smooth(self.plain_us, step_us)
        if not spoken:
            return
        self._rounds = _KEEP * self._rounds + 1
        self._tokens = _KEEP * self._tokens + num_tokens
        self._us = _KEEP * self._us + round_us
        if self.plain_us and self._enough():
            self._judge()

    def _enough(self) -> bool:
        """Whether there is evidence for a verdict. What is forgotten of a few rounds makes less than one."""
        wanted = _NEXT_TRIAL_ROUNDS if self.standing.doubtful else _TRIAL_ROUNDS
        if self.gain < _HEAVY_LOSS:
            wanted = _HEAVY_LOSS_ROUNDS
        return self._rounds > wanted - 1

    def _rested(self, num_tokens: int, round_us: int) -> None:
        # The first such round began with the draft at work.
        if self._rounds:
            self._forget()
        else:
            self.plain_us = _smooth(self.plain_us if self._num_rested else 0.0, round_us)
            self._num_rested += 1
        self.standing.left -= num_tokens
        if self.standing.left <= 0:
            self.resting = False
            # This request tries it; the others wait for what comes of that.
            self.standing.left = self.standing.rest_tokens if self.standing.doubtful else 0

    def _judge(self) -> None:
        if self.gain < 1:
            self.standing.failed()
            self.resting = True
        elif self._num_rested or self.gain >= _CLEAR_GAIN:
            self.standing.paid()
        else:
            self.standing.left = FIRST_REST_TOKENS
            self.resting = True

    def _forget(self) -> None:
        self._rounds = self._tokens = self._us = 0.0


def _smooth(old: float, new: float) -> float:
    return float(new) if old <= 0 else 0.8 * old + 0.2 * new
