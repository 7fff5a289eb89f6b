"""The target's side: which drafted tokens are accepted, and which token follows.

`p` is the target's distribution at a position given the drafted prefix, `q` the draft's, and `x` the drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, DraftDistribution, VerificationMode
from outrider.speculation.batched import verify_batched
from outrider.speculation.candidates import Candidate, NotFinite, Verdict
from outrider.speculation.changes import process
from outrider.speculation.logprobs import add_logprobs, asked_rows, logprob_table
from outrider.speculation.noise import Purpose, gumbel, uniform
from outrider.speculation.sampling import Support, support
from outrider.tree import ROOT


def verify(logits: Tensor, candidates: Sequence[Candidate]) -> list[Verdict]:
    """Verifies every candidate. logits [sum of num_rows, vocab], candidates in order.

    Row 0 of a candidate follows its last committed token, row j its drafted token j - 1. The rows of a candidate with a
    processor are changed in place. If a processor refuses a row, its candidate ends before that row, with an error if
    that is the first; other candidates are not affected. Raises NotFinite.

    On a GPU `batched.py` verifies all rows at once, because every read of a value would wait for the device. On a CPU
    rows are verified one by one up to the first rejection: later rows would be wasted work.
    """
    if not logits.is_cuda:
        return verify_rows(logits, candidates)
    # Kernels are launched on the current GPU, which may be another.
    with torch.cuda.device(logits.device):
        return verify_batched(logits, candidates)


def verify_rows(logits: Tensor, candidates: Sequence[Candidate]) -> list[Verdict]:
    """As verify, on any device."""
    asked = asked_rows(candidates)
    unprocessed = logits[asked] if asked else logits
    refused = process(logits, candidates)
    verdicts = _verify_processed(logits, candidates)
    for number, at in refused.items():
        verdicts[number].cut_before(at.row, at.error)
    if asked:
        add_logprobs(candidates, verdicts, logprob_table(unprocessed, _emitted(candidates, verdicts)))
    return verdicts


def _emitted(candidates: Sequence[Candidate], verdicts: Sequence[Verdict]) -> Tensor:
    """The token of each asked row; any token for a row that decides none."""
    found = []
    for candidate, verdict in zip(candidates, verdicts, strict=True):
        if candidate.num_top is not None:
            tokens = dict(zip([0, *verdict.path], verdict.token_ids, strict=False))
            found += [tokens.get(row, 0) for row in range(candidate.num_rows)]
    return torch.tensor(found)


def _verify_processed(logits: Tensor, candidates: Sequence[Candidate]) -> list[Verdict]:
    # numpy's argmax is four times as fast as torch's. And torch costs some 20 µs per operation here, because its code
    # has left the CPU caches since the last step.
    values = logits.cpu().numpy()
    best = values.argmax(-1)
    # The maximum is not finite where a logit is NaN or +inf, or all are -inf; a masked token alone does no harm.
    if not np.isfinite(values[np.arange(len(values)), best]).all():
        raise NotFinite("logits")
    argmax_ids: list[int] = best.tolist()
    verdicts = []
    start = 0
    for candidate in candidates:
        rows = slice(start, start + candidate.num_rows)
        verify_one = _verify_ratio if candidate.by_ratio else _verify_by_choice
        verdicts.append(verify_one(candidate, logits[rows], argmax_ids[rows]))
        start += candidate.num_rows
    return verdicts


def _verify_by_choice(candidate: Candidate, logits: Tensor, argmax_ids: Sequence[int]) -> Verdict:
    """Greedy and coupled: the target's choice at each node is fixed; a draft is accepted when it is that choice. So it
    is of a point mass by ratio."""
    verdict, draft = Verdict(), candidate.draft
    following = draft.children()
    node = ROOT
    while True:
        position = draft.base_len + verdict.num_accepted
        choice = _choose(candidate, logits[node + 1], argmax_ids[node + 1], position)
        verdict.token_ids.append(choice)
        children = following[node + 1]
        match = next((child for child in children if draft.token_ids[child] == choice), None)
        verdict.num_verified += bool(children)
        if match is None:
            return verdict
        verdict.num_accepted += 1
        verdict.path.append(match + 1)
        node = match


def _choose(candidate: Candidate, logits: Tensor, argmax_id: int, position: int) -> int:
    if candidate.mode is VerificationMode.GREEDY or candidate.params.greedy:
        return argmax_id
    p = support(logits, candidate.params)
    return p.draw(gumbel(candidate.params.seed, position, p.token_ids))


def _verify_ratio(candidate: Candidate, logits: Tensor, _: Sequence[int]) -> Verdict:
    """Accept x with probability min(1, p(x) / q(x)); else sample max(p - q, 0), normalised (Leviathan et al., 1)."""
    verdict = Verdict()
    seed, draft = candidate.params.seed, candidate.draft
    for index, token_id in enumerate(draft.token_ids):
        position = draft.base_len + index
        p = support(logits[index], candidate.params)
        verdict.num_verified += 1
        q = draft.q[index]
        # Strict: p(x) = 0 must never be accepted, not even at u = 0.
        u = uniform(seed, position, Purpose.ACCEPT)
        if not u * q.count_of(token_id) / Q_TOTAL < p.prob_of(token_id):
            verdict.token_ids.append(recover(p, q, gumbel(seed, position, p.token_ids, Purpose.RECOVER)))
            return verdict
        verdict.token_ids.append(token_id)
        verdict.num_accepted += 1
        verdict.path.append(index + 1)
    bonus = support(logits[-1], candidate.params)
    noise = gumbel(seed, draft.base_len + len(draft), bonus.token_ids, Purpose.BONUS)
    verdict.token_ids.append(bonus.draw(noise))
    return verdict


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
