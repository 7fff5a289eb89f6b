"""The draft's side: what it guesses, by the rule its guess will be judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.speculation.batched import guess_batched
from outrider.speculation.noise import Purpose, gumbel, uniform
from outrider.speculation.params import Q_TOTAL, Q_WIDTH, DraftDistribution, SamplingParams, VerificationMode
from outrider.speculation.sampling import Support, support


@dataclass(frozen=True, slots=True)
class Proposal:
    """One guessed token."""

    token_id: int
    confidence: float
    """The draft's own probability of it, after its sampling."""
    q: DraftDistribution | None = None
    """Ratio mode: what it was drawn from."""


def propose(
    logits: Tensor,
    params: Sequence[SamplingParams],
    modes: Sequence[VerificationMode],
    positions: Sequence[int],
    token_map: Tensor | None = None,
) -> list[Proposal]:
    """One token per row of logits [rows, width], for the given absolute positions.

    token_map [width] gives the token id of each logit where they do not cover the vocabulary, in ascending order.
    """
    if logits.is_cuda:
        return propose_batched(logits, params, modes, positions, token_map)
    best = logits.max(-1)
    # Only greedy rows need it, but in one batched operation it costs less than picking them out.
    confidence = torch.exp(best.values - logits.logsumexp(-1)).tolist()
    favourites = best.indices if token_map is None else token_map[best.indices]
    proposals = []
    for row, (token_id, settings, mode) in enumerate(zip(favourites.tolist(), params, modes, strict=True)):
        if mode is VerificationMode.GREEDY or settings.greedy:
            proposals.append(Proposal(token_id, confidence[row], _certain(token_id, mode)))
        else:
            chances = support(logits[row], settings, token_map)
            draw = _draw_ratio if mode is VerificationMode.RATIO else _draw_coupled
            proposals.append(draw(chances, settings.seed, positions[row]))
    return proposals


def propose_batched(
    logits: Tensor,
    params: Sequence[SamplingParams],
    modes: Sequence[VerificationMode],
    positions: Sequence[int],
    token_map: Tensor | None = None,
) -> list[Proposal]:
    """As propose, with one copy from the logits' device."""
    guesses = guess_batched(logits, params, modes, positions, token_map)
    proposals = []
    for row, token_id in enumerate(guesses.token_ids):
        if row in guesses.ratio:
            ids, counts = guesses.ratio[row]
            q = DraftDistribution(tuple(ids), tuple(counts))
            proposals.append(_draw_counts(q, params[row].seed, positions[row]))
        else:
            greedy = params[row].greedy or modes[row] is VerificationMode.GREEDY
            q_of_one = _certain(token_id, modes[row]) if greedy else None
            proposals.append(Proposal(token_id, guesses.confidence[row], q_of_one))
    return proposals


def likeliest(
    logits: Tensor,
    params: SamplingParams,
    mode: VerificationMode,
    positions: Sequence[int],
    count: int,
    token_map: Tensor | None = None,
) -> list[list[Proposal]]:
    """For each row of logits [rows, width] of one sequence the `count` tokens that the target is likeliest to say.

    Likeliest first; the first is what `propose` would say. Not in ratio mode, whose drafts must be drawn.
    """
    if mode is VerificationMode.RATIO:
        raise ValueError("likeliest: not in ratio mode")
    if mode is VerificationMode.GREEDY or params.greedy:
        top = logits.softmax(-1).topk(min(count, logits.shape[-1]))
        ids = top.indices if token_map is None else token_map[top.indices]
        pairs = torch.stack((ids, top.values), -1).tolist()
        return [[Proposal(int(token_id), chance) for token_id, chance in row] for row in pairs]
    return [
        _nearest(support(row, params, token_map), params.seed, position, count)
        for row, position in zip(logits.cpu(), positions, strict=True)
    ]


def _nearest(chances: Support, seed: int, position: int, count: int) -> list[Proposal]:
    """Those nearest to being the noise's choice. How near is taken for how likely: the target has a p of its own."""
    scores = chances.probs.log() + gumbel(seed, position, chances.token_ids)
    top = scores.softmax(-1).topk(min(count, len(scores)))
    ids = chances.token_ids[top.indices].tolist()
    return [Proposal(*pair) for pair in zip(ids, top.values.tolist(), strict=True)]


def _certain(token_id: int, mode: VerificationMode) -> DraftDistribution | None:
    return DraftDistribution((token_id,), (Q_TOTAL,)) if mode is VerificationMode.RATIO else None


def _draw_coupled(chances: Support, seed: int, position: int) -> Proposal:
    index = int((chances.probs.log() + gumbel(seed, position, chances.token_ids)).argmax())
    return Proposal(int(chances.token_ids[index]), float(chances.probs[index]))


def _draw_ratio(chances: Support, seed: int, position: int) -> Proposal:
    return _draw_counts(quantize(chances), seed, position)


def _draw_counts(q: DraftDistribution, seed: int, position: int) -> Proposal:
    # Drawn from the counts themselves: they are what the verifier will divide by.
    point = int(uniform(seed, position, Purpose.DRAFT) * Q_TOTAL)
    for token_id, count in zip(q.token_ids, q.counts, strict=True):
        if point < count:
            return Proposal(token_id, count / Q_TOTAL, q)
        point -= count
    raise AssertionError("counts sum to the total")


def quantize(chances: Support) -> DraftDistribution:
    """The likeliest tokens, at most Q_WIDTH, with counts of at least 1 that sum to Q_TOTAL."""
    top = chances.probs.topk(min(Q_WIDTH, len(chances.probs)))
    shares = top.values / top.values.sum()
    counts = (shares * Q_TOTAL).floor().long().clamp_min(1)
    # The likeliest absorbs what rounding left over or took too much.
    counts[0] += Q_TOTAL - int(counts.sum())
    ids = chances.token_ids[top.indices].tolist()
    return DraftDistribution(tuple(ids), tuple(counts.tolist()))
