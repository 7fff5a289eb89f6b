"""The draft's side: chooses proposals, by the rule that they will be verified with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, Q_WIDTH, DraftDistribution, SamplingParams, VerificationMode
from outrider.speculation.batched import Guesses, guess_batched
from outrider.speculation.choosing import can_choose
from outrider.speculation.noise import Purpose, gumbel, uniform
from outrider.speculation.sampling import Support, support


@dataclass(frozen=True, slots=True)
class Proposal:
    token_id: int
    confidence: float
    """The draft's own probability of it, after its sampling."""
    q: DraftDistribution | None = None
    """Ratio mode: the distribution it was sampled from."""
    others: tuple[tuple[int, float], ...] = ()
    """Alternatives, likeliest first, with the draft's probabilities. None in ratio mode."""


def propose(
    logits: Tensor,
    params: Sequence[SamplingParams],
    modes: Sequence[VerificationMode],
    positions: Sequence[int],
    token_map: Tensor | None = None,
    num_others: int = 0,
) -> list[Proposal]:
    """One token per row of logits [rows, width], for the given absolute positions, with up to `num_others`
    alternatives.

    token_map [width], ascending: the token id of each logit, if the logits do not cover the vocabulary.
    """
    if logits.is_cuda:
        if can_choose():
            # Kernels are launched on the current GPU, which may be another.
            with torch.cuda.device(logits.device):
                return propose_batched(logits, params, modes, positions, token_map, num_others)
        logits, token_map = logits.cpu(), None if token_map is None else token_map.cpu()
    # Only greedy rows need it, but one batched operation costs less than selecting them.
    best = logits.softmax(-1).topk(min(1 + num_others, logits.shape[-1]))
    confidence = best.values.tolist()
    argmax_ids = best.indices if token_map is None else token_map[best.indices]
    proposals = []
    for row, (token_ids, settings, mode) in enumerate(zip(argmax_ids.tolist(), params, modes, strict=True)):
        if mode is VerificationMode.RATIO:
            if settings.greedy:
                proposals.append(Proposal(token_ids[0], confidence[row][0], _certain(token_ids[0])))
            else:
                proposals.append(_draw_ratio(support(logits[row], settings, token_map), settings.seed, positions[row]))
        elif mode is VerificationMode.GREEDY or settings.greedy:
            ranked = list(zip(token_ids, confidence[row], strict=True))
            proposals.append(Proposal(*ranked[0], others=tuple(ranked[1:])))
        else:
            chances = support(logits[row], settings, token_map)
            proposals.append(_draw_coupled(chances, settings.seed, positions[row], num_others))
    return proposals


def propose_batched(
    logits: Tensor,
    params: Sequence[SamplingParams],
    modes: Sequence[VerificationMode],
    positions: Sequence[int],
    token_map: Tensor | None = None,
    num_others: int = 0,
) -> list[Proposal]:
    """As propose, with one copy from the logits' device."""
    guesses = guess_batched(logits, params, modes, positions, token_map, num_others)
    return proposals_of(guesses, params, modes, positions)


def proposals_of(
    guesses: Guesses, params: Sequence[SamplingParams], modes: Sequence[VerificationMode], positions: Sequence[int]
) -> list[Proposal]:
    proposals = []
    for row, token_id in enumerate(guesses.token_ids):
        if row in guesses.ratio:
            ids, counts = guesses.ratio[row]
            q = DraftDistribution(tuple(ids), tuple(counts))
            proposals.append(_draw_counts(q, params[row].seed, positions[row]))
        else:
            ratio = modes[row] is VerificationMode.RATIO
            q_of_one, others = (_certain(token_id), ()) if ratio else (None, guesses.others[row])
            proposals.append(Proposal(token_id, guesses.confidence[row], q_of_one, others))
    return proposals


def _certain(token_id: int) -> DraftDistribution:
    return DraftDistribution((token_id,), (Q_TOTAL,))


def _draw_coupled(chances: Support, seed: int, position: int, num_others: int) -> Proposal:
    scores = chances.probs.log() + gumbel(seed, position, chances.token_ids)
    index = int(scores.argmax())
    token_id, chance = int(chances.token_ids[index]), float(chances.probs[index])
    if not num_others:
        return Proposal(token_id, chance)
    # The softmax of the noisy scores estimates how likely the target, whose p differs a little, chooses each token.
    top = scores.softmax(-1).topk(min(1 + num_others, len(scores)))
    ranked = zip(chances.token_ids[top.indices].tolist(), top.values.tolist(), strict=True)
    return Proposal(token_id, chance, others=tuple(pair for pair in ranked if pair[0] != token_id))


def _draw_ratio(chances: Support, seed: int, position: int) -> Proposal:
    return _draw_counts(quantize(chances), seed, position)


def _draw_counts(q: DraftDistribution, seed: int, position: int) -> Proposal:
    # Sampled from the counts themselves, because the verifier divides by them.
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
    # The likeliest token absorbs the rounding error.
    counts[0] += Q_TOTAL - int(counts.sum())
    ids = chances.token_ids[top.indices].tolist()
    return DraftDistribution(tuple(ids), tuple(counts.tolist()))
