"""From logits to the distribution of the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.options.sampling import SamplingParams

# Enough to hold the mass of top_p at nearly every position; if it is not, the whole row is sorted.
_LIKELY = 512


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that can follow, with their probabilities."""

    token_ids: Tensor
    """[n] int64, ascending."""
    probs: Tensor
    """[n] float64, summing to 1, none of them 0."""

    def prob_of(self, token_id: int) -> float:
        """0 when the token cannot follow."""
        index = int(torch.searchsorted(self.token_ids, token_id))
        if index < len(self.token_ids) and int(self.token_ids[index]) == token_id:
            return float(self.probs[index])
        return 0.0

    def draw(self, noise: Tensor) -> int:
        """The token with the greatest log p + noise [n]: with Gumbel noise, each as often as its p says."""
        return int(self.token_ids[int((self.probs.log() + noise).argmax())])


def support(logits: Tensor, params: SamplingParams, token_map: Tensor | None = None) -> Support:
    """The distribution after temperature, top-k, top-p, min-p. logits [width]; token_map [width] gives their ids.

    Tokens as likely as the last one kept are kept too, so that the result does not depend on the order of ties.
    """
    scaled = logits.double() / params.temperature
    scaled = scaled - scaled.max()
    floor = -torch.inf
    if 0 < params.top_k < len(scaled):
        floor = float(scaled.topk(params.top_k).values[-1])
    if params.min_p > 0:
        floor = max(floor, float(torch.log(torch.tensor(params.min_p, dtype=torch.float64))))
    if params.top_p < 1:
        # top-p's mass is measured among the tokens that top-k keeps; min-p comes last and may cut more.
        top_k_floor = float(scaled.topk(params.top_k).values[-1]) if 0 < params.top_k < len(scaled) else -torch.inf
        floor = max(floor, _top_p_floor(scaled, params.top_p, top_k_floor))
    kept = torch.nonzero((scaled >= floor) & (scaled > -torch.inf))[:, 0]
    weights = torch.exp(scaled[kept])
    nonzero = weights > 0
    kept, weights = kept[nonzero], weights[nonzero]
    ids = kept if token_map is None else token_map[kept]
    return Support(ids, weights / weights.sum())


def _top_p_floor(scaled: Tensor, top_p: float, top_k_floor: float) -> float:
    """The value of the last token needed to reach a mass of top_p."""
    weights = torch.exp(scaled)
    if top_k_floor > -torch.inf:
        weights = weights * (scaled >= top_k_floor)
    wanted = top_p * float(weights.sum())
    likely = torch.topk(weights, min(_LIKELY, len(weights))).values
    if float(likely.sum()) < wanted:
        likely = weights.sort(descending=True).values
    index = int(torch.searchsorted(likely.cumsum(0), wanted))
    return float(torch.log(likely[min(index, len(likely) - 1)])) - 1e-12
