"""Which token follows a row of logits: the rule of all modes, for one row, and its kernels, for all rows at once.

It is the one with the greatest log weight + G, of those that top-k, top-p and min-p keep. In coupled mode its weight is
p; in ratio mode, where a draft is rejected, max(p - q, 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, Q_WIDTH, DraftDistribution
from outrider.speculation.candidates import Candidate
from outrider.speculation.changes import COLUMNS
from outrider.speculation.noise import Purpose, gumbel, uniform
from outrider.speculation.sampling import Support, support

SURE, UNSURE, NOT_FINITE = 0, 1, 2
"""What a kernel says of its choice: UNSURE where float32 does not tell."""
_BLOCK = 2048


def choose_row(candidate: Candidate, row: int, logits: Tensor) -> int:
    """The target's own token at one row of a candidate that is sampled; in ratio mode the drafted one where that is
    accepted. logits [vocab], on a CPU.

    Ratio: accept x with probability min(1, p(x) / q(x)); else sample max(p - q, 0), normalised (Leviathan et al., 1).
    One that is not accepted is never sampled then, for its residual is 0.
    """
    params, draft = candidate.params, candidate.draft
    p, seed, position = support(logits, params), params.seed, candidate.positions[row]
    if not candidate.by_ratio:
        return p.draw(gumbel(seed, position, p.token_ids))
    if row == len(draft):
        return p.draw(gumbel(seed, position, p.token_ids, Purpose.BONUS))
    q, token_id = draft.q[row], draft.token_ids[row]
    # Strict: p(x) = 0 must never be accepted, not even at u = 0.
    if uniform(seed, position, Purpose.ACCEPT) * q.count_of(token_id) / Q_TOTAL < p.prob_of(token_id):
        return token_id
    return recover(p, q, gumbel(seed, position, p.token_ids, Purpose.RECOVER))


def recover(p: Support, q: DraftDistribution, noise: Tensor) -> int:
    """A token of max(p - q, 0), normalised. noise [n]: of p's tokens."""
    residual = p.probs.clone()
    ids = torch.tensor(q.token_ids, dtype=torch.int64)
    counts = torch.tensor(q.counts, dtype=torch.float64)
    at = torch.searchsorted(p.token_ids, ids)
    inside = at < len(p.token_ids)
    inside &= p.token_ids[at.clamp_max(len(p.token_ids) - 1)] == ids
    residual[at[inside]] -= counts[inside] / Q_TOTAL
    residual.clamp_min_(0)
    if float(residual.sum()) <= 0:
        # p = q up to rounding: a rejection then only happens by a rounding error.
        return p.draw(noise)
    return Support(p.token_ids, residual).draw(noise)


def choose(logits: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    """int64 [rows, 2]: the token of each row, and what `choose_kernel` says of it. sent: as `Sampled` and `Changes` lay
    it out. Changes logits in place."""
    found = logits.new_empty(len(logits), 2, dtype=torch.int64)
    _launch("choose_kernel", logits, sent, found, RATIO="quotas" in sent)
    return found


def guess(logits: Tensor, sent: Mapping[str, Tensor], token_map: Tensor | None, count: int) -> Tensor:
    """float64 [rows, 1 + 2 * count]: the least logit that is kept, and the likeliest tokens with their chances; of rows
    that are sampled, those with the greatest scores."""
    found = logits.new_empty(len(logits), 1 + 2 * count, dtype=torch.float64)
    mapped = token_map is not None
    _launch("guess_kernel", logits, sent, found, token_map if mapped else found, MAPPED=mapped, COUNT=count)
    return found


def _launch(kernel: str, logits: Tensor, sent: Mapping[str, Tensor], *more: Tensor | None, **options: object) -> None:
    kernels, (rows, width) = _kernels(), logits.shape
    blocks = -(-width // _BLOCK)
    peaks = logits.new_empty(rows, blocks, dtype=torch.float32)
    places = logits.new_empty(rows, blocks, dtype=torch.int32)
    changed = "changes" in sent
    kernels.survey_kernel[(rows, blocks)](
        logits,
        peaks,
        places,
        *(sent[name] if changed else places for name in COLUMNS),
        logits.stride(0),
        width,
        sent["masks"].shape[1] if changed else 0,
        BLOCK=_BLOCK,
        CHANGED=changed,
        num_warps=8,
    )
    reals = sent.get("reals", peaks)
    getattr(kernels, kernel)[(rows,)](
        logits,
        peaks,
        places,
        sent.get("numbers", places),
        reals,
        sent.get("integers", places),
        sent.get("quotas", places),
        *more,
        reals.shape[-1],
        logits.stride(0),
        width,
        BLOCK=_BLOCK,
        BLOCKS=1 << (blocks - 1).bit_length(),
        SAMPLED="numbers" in sent,
        QUOTAS=Q_WIDTH,
        num_warps=32,
        **options,
    )


def can_choose() -> bool:
    """Whether the kernels can be imported."""
    try:
        return _kernels() is not None
    except ImportError:
        return False


@cache
def _kernels() -> ModuleType:
    # Imported here: where rows are on a CPU nobody needs Triton.
    from outrider.speculation import choice_kernels

    return choice_kernels
