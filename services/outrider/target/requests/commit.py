"""From a verdict to the tokens that are committed, one by one, so that a stop inside accepted drafts is exact. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from outrider.sequence.key import Finish
from outrider.speculation import Verdict
from outrider.target.requests.row import StepRow


def apply_stop_conditions(
    row: StepRow[Any], verdict: Verdict, *, stop_token_ids: AbstractSet[int], remaining: int
) -> None:
    """Fills in what the row commits: up to the first stop token, which is kept, or `remaining` tokens, whichever comes
    first."""
    tokens, row.num_verified = verdict.token_ids, verdict.num_verified
    nodes = [at - 1 for at in verdict.path] if row.draft.parents else range(verdict.num_accepted)
    if len(tokens) >= remaining or not stop_token_ids.isdisjoint(tokens):
        for count, token in enumerate(tokens, start=1):
            if token in stop_token_ids:
                row.finish = Finish.STOP
            elif count == remaining:
                row.finish = Finish.LENGTH
            if row.finish is not Finish.NONE:
                if count < len(tokens):
                    row.num_verified = min(count, verdict.num_accepted)
                tokens = tokens[:count]
                break
    row.token_ids, row.accepted = tokens, nodes[: len(tokens)]
