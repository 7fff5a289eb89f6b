"""The target's side: which drafted tokens are accepted, and which token follows.

`p` is the target's distribution at a position given the drafted prefix, `q` the draft's, and `x` the drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.options.sampling import VerificationMode
from outrider.speculation.batched import verify_batched, walk
from outrider.speculation.candidates import Candidate, NotFinite
from outrider.speculation.changes import process
from outrider.speculation.choosing import can_choose, choose_row
from outrider.speculation.logprobs import add_logprobs, asked_rows, logprob_table


def verify(logits: Tensor, candidates: Sequence[Candidate]) -> None:
    """Verifies every candidate, and fills it in. logits [sum of num_rows, vocab], candidates in order.

    Row 0 of a candidate follows its last committed token, row j its drafted token j - 1. The rows of a candidate with a
    processor are changed in place. If a processor refuses a row, its candidate ends before that row, with an error if
    that is the first; other candidates are not affected. Raises NotFinite, and InvalidRequest for a draft without
    its q.

    On a GPU `batched.py` verifies all rows at once, because every read of a value would wait for the device. On a CPU
    rows are verified one by one up to the first rejection: later rows would be wasted work.
    """
    for candidate in candidates:
        candidate.check()
    if not logits.is_cuda:
        verify_rows(logits, candidates)
    elif not can_choose():
        verify_rows(logits.cpu(), candidates)
    else:
        # Kernels are launched on the current GPU, which may be another.
        with torch.cuda.device(logits.device):
            verify_batched(logits, candidates)


def verify_rows(logits: Tensor, candidates: Sequence[Candidate]) -> None:
    """As verify, on any device."""
    asked = asked_rows(candidates)
    unprocessed = logits[asked] if asked else logits
    refused = process(logits, candidates)
    _verify_processed(logits, candidates)
    for number, at in refused.items():
        candidates[number].cut_before(at.row, at.error)
    if asked:
        add_logprobs(candidates, logprob_table(unprocessed, _emitted(candidates)))


def _emitted(candidates: Sequence[Candidate]) -> Tensor:
    """The token of each asked row; any token for a row that decides none."""
    found = []
    for candidate in candidates:
        if candidate.num_top is not None:
            tokens = dict(zip(candidate.emitting, candidate.token_ids, strict=True))
            found += [tokens.get(row, 0) for row in range(candidate.num_rows)]
    return torch.tensor(found)


def _verify_processed(logits: Tensor, candidates: Sequence[Candidate]) -> None:
    # numpy's argmax is four times as fast as torch's. And torch costs some 20 µs per operation here, because its code
    # has left the CPU caches since the last step.
    values = logits.cpu().numpy()
    best = values.argmax(-1)
    # The maximum is not finite where a logit is NaN or +inf, or all are -inf; a masked token alone does no harm.
    if not np.isfinite(values[np.arange(len(values)), best]).all():
        raise NotFinite("logits")
    own, start = best.tolist(), 0
    for candidate in candidates:
        walk(candidate, partial(_choose, candidate, logits[start:], own[start:]))
        start += candidate.num_rows


def _choose(candidate: Candidate, logits: Tensor, likeliest: Sequence[int], row: int) -> int:
    greedy = candidate.mode is VerificationMode.GREEDY or candidate.params.greedy
    return likeliest[row] if greedy else choose_row(candidate, row, logits[row])
