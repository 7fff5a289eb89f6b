"""Which token follows, for many rows of logits at once.

It is the one with the greatest log weight + G, of those that top-k, top-p and min-p keep. In coupled mode its weight is
p; in ratio mode, where a draft is rejected, max(p - q, 0). It is found without a pass in float64 over the vocabulary,
on a shortlist: of the likeliest tokens, if rows are cut by rank; else of the few whose score is greatest in float32,
and in ratio mode of those that q names. Each row says whether its choice is certain, which almost all are; the caller
lets the others be chosen from the whole vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from outrider.options.sampling import Q_TOTAL
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


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Some tokens of each row."""

    token_ids: Tensor
    """int64 [rows, n]; likeliest first, if they are the likeliest."""
    scaled: Tensor
    """float64 [rows, n]: logits by temperature, less the row's greatest."""
    floors: Sequence[Tensor]
    """float64 [rows, 1]: the least scaled logit that is kept. Two where the mass of all tokens is not exact: at the
    least that it may be, and at the greatest."""
    certain: Tensor
    """bool [rows]: whether all that a floor keeps is listed, or has a score in `scores`."""
    scores: Tensor | None = None
    """float32 [rows, vocab]: scaled logit + G, if the tokens are those with the greatest. Without the tokens of q."""
    beyond: Tensor | None = None
    """float32 [rows, 1]: no other token has a score of more. None: no other token is kept."""
    least_mass: Tensor | None = None
    """float64 [rows, 1]: what all that is kept weighs at least, though not all of it is listed."""

    def kept(self, floor: Tensor) -> Tensor:
        """float64 [rows, n]: the weights of the tokens; 0 below the floor."""
        return _kept(self.scaled, floor)

    def masses(self, logits: Tensor, tops: Tensor, settings: Settings) -> list[tuple[Tensor, Tensor]]:
        """Each floor with the weight of all that it keeps, float64 [rows, 1]. Where that is summed in float32, at
        the least and at the greatest that it may be, if no token is near the floor."""
        if self.scores is None:
            sums = [(floor, self.kept(floor).sum(-1, keepdim=True)) for floor in self.floors]
            least = self.least_mass
            return sums if least is None else [(floor, torch.maximum(mass, least)) for floor, mass in sums]
        [floor] = self.floors
        scaled = (logits[settings.rows] - tops[settings.rows, None]) / settings.temperature[:, None].float()
        mass = _kept(scaled, floor.float()).sum(-1, keepdim=True).double()
        return [(floor, mass * (1 - _MASS_ERROR)), (floor, mass * (1 + _MASS_ERROR))]


def choose(logits: Tensor, tops: Tensor, settings: Settings, *, exactly: bool) -> tuple[Tensor, Tensor]:
    """Of rows in coupled mode, none of them greedy: tokens, and which are certain. tops: the maximum of each row of
    logits. exactly: from the whole vocabulary; then all are certain."""
    found = shortlist(logits, tops, settings, exactly=exactly)
    # The scaled logits are log weights.
    return _pick(
        found, [torch.where(found.scaled >= floor, found.scaled, -torch.inf) for floor in found.floors], settings
    )


def accept(logits: Tensor, tops: Tensor, settings: Settings, *, exactly: bool) -> tuple[Tensor, Tensor]:
    """As choose, of rows in ratio mode: the drafted token where it is accepted. One that is not is never chosen, for
    its residual is 0."""
    found, more = shortlist(logits, tops, settings, exactly=exactly), settings.more
    q = logits.new_zeros(len(settings.rows), logits.shape[1]).scatter_add_(1, more["q_ids"], more["q_counts"].float())
    q_listed = q.gather(1, found.token_ids).double() / Q_TOTAL
    drafted = _scaled(logits, tops, settings, more["drafted"][:, None])
    accepted, weights = [], []
    for floor, mass in found.masses(logits, tops, settings):
        accepted.append(more["bound"] * mass[:, 0] < _kept(drafted, floor)[:, 0])
        p = found.kept(floor)
        residual = (p - q_listed * mass).clamp_min_(0)
        # p itself where nothing is left: p = q up to rounding.
        weights.append(torch.where((residual > 0).any(-1, keepdim=True), residual, p).log())
    tokens, certain = _pick(found, weights, settings)
    return torch.where(accepted[0], more["drafted"], tokens), (accepted[0] == accepted[-1]) & (accepted[0] | certain)


def _pick(found: Shortlist, log_weights: Sequence[Tensor], settings: Settings) -> tuple[Tensor, Tensor]:
    """Picked twice where the weights [rows, n] are not exact, at both ends of what they may be. They are linear in the
    mass: a token that is picked at both ends is picked at all between."""
    noise, certain, tokens = gumbel_of(settings.more["keys"][:, None], found.token_ids), found.certain, []
    for each in log_weights:
        winner = (each + noise).max(-1, keepdim=True)
        tokens.append(found.token_ids.gather(1, winner.indices)[:, 0])
        if found.beyond is not None:
            certain = certain & (winner.values - _SCORE_ERROR > found.beyond)[:, 0]
    return tokens[0], certain & (tokens[0] == tokens[-1])


def shortlist(
    logits: Tensor,
    tops: Tensor,
    settings: Settings,
    token_map: Tensor | None = None,
    *,
    exactly: bool = False,
    least: int = _BEST,
) -> Shortlist:
    """On which the choice is. least: how many tokens it must have. token_map: the token id of each logit."""
    width = logits.shape[1]
    if settings.ranks:
        return likeliest(logits, settings, width if exactly else LIKELIEST)
    kernels = _kernels() if not exactly and (logits.is_cuda or _interpreted()) else None
    if kernels is not None:
        return _best(kernels, logits, tops, settings, token_map, max(least, _BEST))
    every = torch.arange(width, device=logits.device).expand(len(settings.rows), -1)
    scaled = _scaled(logits, tops, settings, every)
    return Shortlist(every, scaled, [settings.log_min_p[:, None]], torch.ones_like(settings.rows, dtype=torch.bool))


def likeliest(logits: Tensor, settings: Settings, count: int = LIKELIEST) -> Shortlist:
    """The likeliest tokens of each row. Where they do not reach top-p, all are kept, and the row is not certain."""
    chosen, width = logits[settings.rows], logits.shape[1]
    top = chosen.topk(min(count, width))
    temperature = settings.temperature[:, None]
    scaled = top.values.double() / temperature
    scaled -= scaled[:, :1].clone()
    top_k = _top_k_floor(scaled, settings)
    kept = _kept(scaled, top_k)
    masses = [kept.sum(-1, keepdim=True)]
    # Tokens equal to the last one that top-k keeps may be beyond the likeliest.
    certain = _holds_all(scaled, top_k, settings, width) | (settings.top_k == width)
    if settings.sums_all and scaled.shape[1] < width:
        of_all = ((chosen - top.values[:, :1]) / temperature.float()).exp_().sum(-1, keepdim=True).double()
        all_count = settings.top_k[:, None] == width
        mass, error = torch.where(all_count, of_all, masses[0]), torch.where(all_count, _MASS_ERROR, 0.0)
        masses = [mass * (1 - error), mass * (1 + error)]
    top_p = [_top_p_floor(scaled, top_k, kept, mass, settings) for mass in masses]
    floors = [torch.maximum(settings.log_min_p[:, None], floor) for floor in top_p]
    # Where min-p does not cut more, top-p keeps at least its share, which may be more than the likeliest weigh.
    least = torch.where(top_p[0] < settings.log_min_p[:, None], 0.0, settings.top_p[:, None] * masses[0])
    # The last floor is the lowest.
    holds = certain & _holds_all(scaled, floors[-1], settings, width)
    return Shortlist(top.indices, scaled, floors, holds, least_mass=least)


def _top_k_floor(ranked: Tensor, settings: Settings) -> Tensor:
    """[rows, 1]: the scaled logit of the last token that top-k keeps. Tokens equal to it are kept too."""
    kept = ranked.gather(1, settings.top_k[:, None].clamp_max(ranked.shape[1]) - 1)
    all_kept = settings.top_k[:, None] > ranked.shape[1]
    return torch.where(all_kept, -torch.inf, kept)


def _kept(scaled: Tensor, floor: Tensor) -> Tensor:
    """The weights of the tokens from the floor on; 0 for the others."""
    return torch.where(scaled >= floor, torch.exp(scaled), 0.0)


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
        return torch.ones_like(settings.rows, dtype=torch.bool)
    return (ranked[:, -1:] < floor)[:, 0] & ((settings.top_k <= count) | (settings.top_k == width))


def _scaled(logits: Tensor, tops: Tensor, settings: Settings, at: Tensor) -> Tensor:
    """float64 [rows, n]: the scaled logits at [rows, n]."""
    temperature = settings.temperature[:, None]
    return logits[settings.rows[:, None], at].double() / temperature - tops[settings.rows, None].double() / temperature


def _best(
    kernels: ModuleType, logits: Tensor, tops: Tensor, settings: Settings, token_map: Tensor | None, least: int
) -> Shortlist:
    count, width = len(settings.rows), logits.shape[1]
    scores = logits.new_empty(count, width)
    kernels.noisy_scores_kernel[(count, -(-width // _BLOCK))](
        logits,
        settings.rows,
        tops[settings.rows],
        (1 / settings.temperature).float(),
        (settings.log_min_p - _SCORE_ERROR).float(),
        settings.more["keys"],
        settings.rows if token_map is None else token_map,
        scores,
        logits.stride(0),
        width,
        MAPPED=token_map is not None,
        BLOCK=_BLOCK,
    )
    q_ids = settings.more.get("q_ids")
    if q_ids is not None:
        scores.scatter_(1, q_ids, -torch.inf)
    best = scores.topk(min(least, width))
    token_ids = best.indices if q_ids is None else torch.cat([best.indices, q_ids], 1)
    return Shortlist(
        token_ids,
        _scaled(logits, tops, settings, token_ids),
        [settings.log_min_p[:, None]],
        torch.ones_like(settings.rows, dtype=torch.bool),
        scores,
        best.values[:, -1:] if width > least else None,
    )


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
