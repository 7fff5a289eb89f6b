"""Which token follows, for many rows of logits at once.

A token of coupled mode is the one with the greatest log p + G, of those that top-k, top-p and min-p keep. It is found
without a pass in float64 over the vocabulary: among the likeliest tokens, if rows are cut by rank; else among the few
whose score is greatest in float32. Each row says whether its choice is certain, which almost all are; the caller lets
the others be chosen exactly.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from outrider.speculation.noise import gumbel_of
from outrider.speculation.sampled_rows import Settings

LIKELIEST = 512
"""Tokens among which a rank is looked for. Few distributions need more to reach a top-p."""
_BEST, _BLOCK = 8, 2048
_MASS_ERROR = 1e-5
"""Relative, of a sum of so many exponentials in float32: the terms' own errors are below 1e-6."""
_SCORE_ERROR = 1e-3
"""Of a score in float32, for tokens that may win. Those are at most 41 below the likeliest, because noise is from -3.7
to 37.4; the rounding of such numbers is far less."""


def probabilities(
    logits: Tensor, argmax_ids: Tensor | None, settings: Settings, likeliest: int = LIKELIEST
) -> tuple[Tensor, Tensor]:
    """float64 [rows, vocab] for the rows in `settings`: each sums to 1, with 0 for tokens that cannot follow. As
    `support`, in rows that are certain: bool [rows]. argmax_ids: of each row of logits, for greedy rows."""
    chosen = logits[settings.rows]
    temperature = settings.temperature[:, None]
    top = chosen.double().amax(-1, keepdim=True) / temperature
    scaled = chosen.double() / temperature - top
    floor, certain = settings.log_min_p[:, None], torch.ones_like(settings.greedy)
    if settings.ranks:
        ranked = chosen.topk(min(likeliest, chosen.shape[1])).values.double() / temperature - top
        top_k = _top_k_floor(ranked, settings)
        mass = _kept(scaled, top_k).sum(-1, keepdim=True)
        floor = torch.maximum(floor, _top_p_floor(ranked, top_k, _kept(ranked, top_k), mass, settings))
        no_rank = (settings.top_k == chosen.shape[1]) & (settings.top_p == 1)
        certain = _holds_all(ranked, floor, settings, chosen.shape[1]) | no_rank
    weights = torch.where(scaled >= floor, torch.exp(scaled), 0.0)
    probs = weights / weights.sum(-1, keepdim=True)
    if argmax_ids is None:
        return probs, certain
    one = torch.zeros_like(probs).scatter_(1, argmax_ids[settings.rows][:, None], 1.0)
    return torch.where(settings.greedy[:, None], one, probs), certain | settings.greedy


def _top_k_floor(ranked: Tensor, settings: Settings) -> Tensor:
    """[rows, 1]: the scaled logit of the last token that top-k keeps. Tokens equal to it are kept too."""
    kept = ranked.gather(1, settings.top_k[:, None].clamp_max(ranked.shape[1]) - 1)
    all_kept = settings.top_k[:, None] > ranked.shape[1]
    return torch.where(all_kept, -torch.inf, kept)


def _kept(scaled: Tensor, top_k: Tensor) -> Tensor:
    """The weights of the tokens that top-k keeps; 0 for the others."""
    return torch.where(scaled >= top_k, torch.exp(scaled), 0.0)


def _top_p_floor(ranked: Tensor, top_k: Tensor, kept: Tensor, mass: Tensor, settings: Settings) -> Tensor:
    """[rows, 1]: the floor of both. `kept`: the weights of the ranked tokens; `mass`: [rows, 1], that of all tokens
    that top-k keeps."""
    last = torch.searchsorted(kept.cumsum(-1), settings.top_p[:, None] * mass).clamp_max(ranked.shape[1] - 1)
    top_p = ranked.gather(1, last) - 1e-12
    # top_p = 1 keeps every token, the least likely one included.
    return torch.where(settings.top_p[:, None] < 1, torch.maximum(top_k, top_p), top_k)


def _holds_all(ranked: Tensor, floor: Tensor, settings: Settings, width: int) -> Tensor:
    """[rows]: whether no token beyond the ranked ones is kept, and top-k is among them."""
    count = ranked.shape[1]
    if count == width:
        return torch.ones_like(settings.greedy)
    return (ranked[:, -1:] < floor)[:, 0] & ((settings.top_k <= count) | (settings.top_k == width))


def choose(logits: Tensor, tops: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Of rows in coupled mode, none of them greedy: tokens, and which are certain. tops: the maximum of each row of
    logits."""
    if settings.ranks:
        return _among_likeliest(logits[settings.rows], settings)
    kernels = _kernels() if logits.is_cuda or _interpreted() else None
    if kernels is not None:
        return _among_best(kernels, logits, tops, settings)
    return choose_exactly(logits, settings), torch.ones_like(settings.greedy)


def choose_exactly(logits: Tensor, settings: Settings) -> Tensor:
    """As choose. In float64 over the whole vocabulary, sorted where a rank is asked for."""
    tokens = []
    for part in settings.chunks(logits.shape[1]):
        probs, _ = probabilities(logits, None, part, logits.shape[1])
        tokens.append(gumbel_scores(probs, part.more["keys"]).argmax(-1))
    return torch.cat(tokens)


def gumbel_scores(probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """log p + G, of probs [rows, width]. log(0) is -inf, which never wins. token_ids: [width]; None: from 0 on."""
    ids = torch.arange(probs.shape[1], device=probs.device) if token_ids is None else token_ids
    return probs.log() + gumbel_of(keys[:, None], ids)


def _among_likeliest(chosen: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Chosen twice where the mass of all tokens is not exact, at the least and at the greatest that it may be: both are
    the exact choice, or it is not certain."""
    width = chosen.shape[1]
    likeliest = chosen.topk(min(LIKELIEST, width))
    temperature = settings.temperature[:, None]
    scaled = likeliest.values.double() / temperature
    scaled -= scaled[:, :1].clone()
    top_k = _top_k_floor(scaled, settings)
    kept = _kept(scaled, top_k)
    mass = kept.sum(-1, keepdim=True)
    masses = [mass]
    # Tokens equal to the last one that top-k keeps may be beyond the likeliest.
    certain = _holds_all(scaled, top_k, settings, width) | (settings.top_k == width)
    if settings.sums_all and scaled.shape[1] < width:
        of_all = ((chosen - likeliest.values[:, :1]) / temperature.float()).exp_().sum(-1, keepdim=True).double()
        all_count = settings.top_k[:, None] == width
        mass, error = torch.where(all_count, of_all, mass), torch.where(all_count, _MASS_ERROR, 0.0)
        masses = [mass * (1 - error), mass * (1 + error)]
    scores = scaled + gumbel_of(settings.more["keys"][:, None], likeliest.indices)
    choices = []
    for each in masses:
        floor = torch.maximum(settings.log_min_p[:, None], _top_p_floor(scaled, top_k, kept, each, settings))
        choices.append(torch.where(scaled >= floor, scores, -torch.inf).argmax(-1))
    # The last floor is the lower one.
    certain &= _holds_all(scaled, floor, settings, width) & (choices[0] == choices[-1])
    return likeliest.indices.gather(1, choices[0][:, None])[:, 0], certain


def _among_best(kernels: ModuleType, logits: Tensor, tops: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    count, width = len(settings.rows), logits.shape[1]
    keys, top = settings.more["keys"], tops[settings.rows]
    scores = logits.new_empty(count, width)
    floors = (settings.log_min_p - _SCORE_ERROR).float()
    kernels.noisy_scores_kernel[(count, -(-width // _BLOCK))](
        logits, settings.rows, top, (1 / settings.temperature).float(), floors, keys, scores, width, BLOCK=_BLOCK
    )
    best = scores.topk(min(_BEST, width))
    values = logits[settings.rows[:, None], best.indices].double()
    scaled = values / settings.temperature[:, None] - (top.double() / settings.temperature)[:, None]
    exact = scaled + gumbel_of(keys[:, None], best.indices)
    winner = torch.where(scaled >= settings.log_min_p[:, None], exact, -torch.inf).max(-1, keepdim=True)
    certain = (winner.values - _SCORE_ERROR > best.values[:, -1:])[:, 0]
    return best.indices.gather(1, winner.indices)[:, 0], certain | (width <= _BEST)


@cache
def _kernels() -> ModuleType | None:
    """None without Triton."""
    try:
        from outrider.speculation import noise_kernels
    except ImportError:
        return None
    return noise_kernels


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
