"""From a verdict to the tokens that are committed, one by one, so that a stop inside accepted drafts is exact. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from outrider.protocol.sequence_key import Finish
from outrider.speculation import Verdict


@dataclass(slots=True)
class Outcome:
    """What one step commits for one sequence."""

    token_ids: list[int]
    """Accepted drafts, then the target's own token unless the sequence ended before it."""
    num_drafted: int
    num_verified: int
    """Positions verified that count: up to the end of the sequence, or to the first rejection."""
    num_accepted: int
    finish: Finish


def apply_stop_conditions(
    verdict: Verdict, num_drafted: int, *, stop_token_ids: AbstractSet[int], remaining: int
) -> Outcome:
    """Cuts a verdict at the first stop token, which is kept, or after `remaining` tokens, whichever comes first."""
    tokens, finish = verdict.token_ids, Finish.NONE
    if len(tokens) < remaining and stop_token_ids.isdisjoint(tokens):
        return Outcome(tokens, num_drafted, verdict.num_verified, verdict.num_accepted, finish)
    for count, token in enumerate(tokens, start=1):
        if token in stop_token_ids:
            finish = Finish.STOP
        elif count == remaining:
            finish = Finish.LENGTH
        if finish is not Finish.NONE:
            tokens = tokens[:count]
            break
    accepted = min(verdict.num_accepted, len(tokens))
    was_cut = len(tokens) < len(verdict.token_ids)
    return Outcome(
        token_ids=tokens,
        num_drafted=num_drafted,
        num_verified=accepted if was_cut else verdict.num_verified,
        num_accepted=accepted,
        finish=finish,
    )
