"""What verification says of candidates, apart from them: so two verifications of the same ones can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from outrider import speculation
from outrider.options.logprobs import TokenLogprobs
from outrider.speculation import Candidate, batched
from torch import Tensor


class Judged(NamedTuple):
    token_ids: list[int]
    accepted: list[int]
    num_accepted: int
    num_verified: int
    top: list[TokenLogprobs]
    error: Exception | None


Verify = Callable[[Tensor, Sequence[Candidate]], list[Judged]]


def _judged(
    verifying: Callable[[Tensor, Sequence[Candidate]], None], logits: Tensor, candidates: Sequence[Candidate]
) -> list[Judged]:
    verifying(logits, candidates)
    return [
        Judged(list(c.token_ids), list(c.accepted), c.num_accepted, c.num_verified, list(c.top), c.error)
        for c in candidates
    ]


verify: Verify = partial(_judged, speculation.verify)
verify_batched: Verify = partial(_judged, batched.verify_batched)
