"""Proposes and verifies many rows at once. For GPUs, where every read of a value waits for the device.

The rules and the noise are those of `verification.py`, `proposals.py` and `sampling.py`, which work row by row. All
inputs go to the device in one copy, and all results come back in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, Q_WIDTH, SamplingParams, VerificationMode
from outrider.speculation.candidates import Candidate, NotFinite, Verdict
from outrider.speculation.noise import Purpose, gumbel_key, gumbel_of, uniform

# Rows that are sampled at once, which bounds memory: several float64 tensors over the vocabulary.
_CHUNK = 64


def verify_batched(logits: Tensor, candidates: Sequence[Candidate]) -> list[Verdict]:
    """As verify. One copy to the device when any row is sampled, and one from it."""
    sampled_rows = _SampledRows.of(candidates)
    best = logits.max(-1)
    # The target's token for each row, and, in ratio mode, whether the row's drafted token is accepted.
    tokens, accepted = best.indices.clone(), torch.zeros_like(best.indices)
    if sampled_rows.coupled:
        _choose_coupled(logits, best.indices, sampled_rows.coupled, tokens)
    if sampled_rows.ratio:
        _verify_ratio(logits, best.indices, sampled_rows.ratio, tokens, accepted)
    # The maximum is not finite where a logit is NaN or +inf, or all are -inf.
    finite = torch.isfinite(best.values).long()
    results = torch.stack((tokens, accepted, finite)).cpu()
    if not bool(results[2].all()):
        raise NotFinite("logits")
    own, accept = results[0].tolist(), results[1].tolist()
    verdicts, start = [], 0
    for candidate in candidates:
        rows = slice(start, start + candidate.num_rows)
        verdicts.append(_walk(candidate, own[rows], accept[rows]))
        start += candidate.num_rows
    return verdicts


def _walk(candidate: Candidate, own: Sequence[int], accepted: Sequence[int]) -> Verdict:
    """From each row's own token to the verdict."""
    verdict, node = Verdict(), -1
    while True:
        children = candidate.children(node)
        verdict.num_verified += bool(children)
        if candidate.mode is VerificationMode.RATIO:
            match = children[0] if children and accepted[node + 1] else None
        else:
            match = next((child for child in children if candidate.draft[child] == own[node + 1]), None)
        verdict.token_ids.append(own[node + 1] if match is None else candidate.draft[match])
        if match is None:
            return verdict
        verdict.num_accepted += 1
        verdict.path.append(match + 1)
        node = match


@dataclass(slots=True)
class _Sampled:
    """Rows of logits that are sampled, and how. Each list has one entry per row."""

    rows: list[int] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    """Coupled: key of the noise."""
    drafted: list[int] = field(default_factory=list)
    """Ratio: the drafted token, or any token if none is drafted."""
    bound: list[float] = field(default_factory=list)
    """Ratio: the drafted token is accepted when its p exceeds this; infinite if none is drafted."""
    draw: list[float] = field(default_factory=list)
    """Ratio: the quantile at which the row's own token is drawn."""
    q_ids: list[tuple[int, ...]] = field(default_factory=list)
    q_counts: list[tuple[int, ...]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def add(self, row: int, params: SamplingParams) -> None:
        self.rows.append(row)
        self.params.append(params)


@dataclass(slots=True)
class _SampledRows:
    """The candidates' rows, by verification rule. Greedy rows need no entry."""

    coupled: _Sampled = field(default_factory=_Sampled)
    ratio: _Sampled = field(default_factory=_Sampled)

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> _SampledRows:
        sampled_rows, start = cls(), 0
        for candidate in candidates:
            if candidate.mode is VerificationMode.RATIO:
                sampled_rows._add_ratio(candidate, start)
            elif candidate.mode is VerificationMode.COUPLED and not candidate.params.greedy:
                sampled_rows._add_coupled(candidate, start)
            start += candidate.num_rows
        return sampled_rows

    def _add_coupled(self, candidate: Candidate, start: int) -> None:
        depths = [0]
        for index in range(len(candidate.draft)):
            parent = candidate.parents[index] if candidate.parents else index - 1
            depths.append(depths[parent + 1] + 1)
        for row, depth in enumerate(depths):
            self.coupled.add(start + row, candidate.params)
            self.coupled.keys.append(gumbel_key(candidate.params.seed, candidate.base_len + depth))

    def _add_ratio(self, candidate: Candidate, start: int) -> None:
        seed, ratio = candidate.params.seed, self.ratio
        for index in range(candidate.num_rows):
            position = candidate.base_len + index
            ratio.add(start + index, candidate.params)
            if index == len(candidate.draft):
                ratio.drafted.append(0)
                ratio.bound.append(np.inf)
                ratio.draw.append(uniform(seed, position, Purpose.BONUS))
                ratio.q_ids.append(())
                ratio.q_counts.append(())
            else:
                token_id, q = candidate.draft[index], candidate.q[index]
                ratio.drafted.append(token_id)
                ratio.bound.append(uniform(seed, position, Purpose.ACCEPT) * q.count_of(token_id) / Q_TOTAL)
                ratio.draw.append(uniform(seed, position, Purpose.RECOVER))
                ratio.q_ids.append(q.token_ids)
                ratio.q_counts.append(q.counts)


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are sampled: tensors on the device with one entry per row, int64 unless noted."""

    rows: Tensor
    temperature: Tensor
    """float64; 1 for greedy rows."""
    top_k: Tensor
    """The vocabulary's size when all are kept."""
    top_p: Tensor
    """float64"""
    log_min_p: Tensor
    """float64"""
    greedy: Tensor
    """bool"""
    more: dict[str, Tensor]
    sorts: bool
    """Whether any row uses top-k or top-p."""


def _send(sampled: _Sampled, logits: Tensor) -> Settings:
    """One copy to the device."""
    rows, params = sampled.rows, sampled.params
    count, width = len(rows), logits.shape[1]
    columns: dict[str, np.ndarray] = {
        "rows": np.array(rows, dtype=np.int64),
        "temperature": np.array([p.temperature or 1.0 for p in params], dtype=np.float64),
        "top_k": np.array([p.top_k if 0 < p.top_k < width else width for p in params], dtype=np.int64),
        "top_p": np.array([p.top_p for p in params], dtype=np.float64),
        "log_min_p": np.log(np.array([max(p.min_p, 1e-300) for p in params], dtype=np.float64)),
        "greedy": np.array([p.greedy for p in params], dtype=np.int64),
    }
    floats = {"temperature", "top_p", "log_min_p", "bound", "draw"}
    if sampled.keys:
        columns["keys"] = np.array(sampled.keys, dtype=np.int64)
    if sampled.bound:
        columns["drafted"] = np.array(sampled.drafted, dtype=np.int64)
        columns["bound"] = np.array(sampled.bound, dtype=np.float64)
        columns["draw"] = np.array(sampled.draw, dtype=np.float64)
        columns["q_ids"], columns["q_counts"] = _padded(sampled.q_ids), _padded(sampled.q_counts)
    packed = torch.from_numpy(np.concatenate([c.view(np.int64).reshape(-1) for c in columns.values()]))
    if logits.is_cuda:
        packed = packed.pin_memory()
    sent = packed.to(logits.device, non_blocking=True)
    found, start = {}, 0
    for name, column in columns.items():
        part = sent[start : start + column.size].view(column.shape if column.ndim > 1 else (count,))
        found[name] = part.view(torch.float64) if name in floats else part
        start += column.size
    named = {name: found.pop(name) for name in ("rows", "temperature", "top_k", "top_p", "log_min_p")}
    greedy = found.pop("greedy").bool()
    sorts = any(p.top_p < 1 or 0 < p.top_k < width for p in params)
    return Settings(**named, greedy=greedy, more=found, sorts=sorts)


def _padded(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """[rows, Q_WIDTH], padded with zeros."""
    table = np.zeros((len(lists), Q_WIDTH), dtype=np.int64)
    for row, values in enumerate(lists):
        table[row, : len(values)] = values
    return table


def _chunks(settings: Settings) -> Iterator[Settings]:
    count = settings.rows.shape[0]
    for start in range(0, count, _CHUNK):
        cut = slice(start, start + _CHUNK)
        yield Settings(
            settings.rows[cut],
            settings.temperature[cut],
            settings.top_k[cut],
            settings.top_p[cut],
            settings.log_min_p[cut],
            settings.greedy[cut],
            {name: value[cut] for name, value in settings.more.items()},
            settings.sorts,
        )


def probabilities(logits: Tensor, favourites: Tensor, settings: Settings) -> Tensor:
    """float64 [rows, vocab] for the rows in `settings`: each sums to 1, with 0 for tokens that cannot follow. As
    `support`."""
    chosen = logits[settings.rows]
    temperature = settings.temperature[:, None]
    top = chosen.double().amax(-1, keepdim=True) / temperature
    scaled = chosen.double() / temperature - top
    floor = settings.log_min_p[:, None]
    if settings.sorts:
        floor = torch.maximum(floor, _rank_floor(chosen, top, settings))
    weights = torch.where(scaled >= floor, torch.exp(scaled), 0.0)
    probs = weights / weights.sum(-1, keepdim=True)
    certain = torch.zeros_like(probs).scatter_(1, favourites[settings.rows][:, None], 1.0)
    return torch.where(settings.greedy[:, None], certain, probs)


def _rank_floor(chosen: Tensor, top: Tensor, settings: Settings) -> Tensor:
    """[rows, 1]: the scaled logit below which top-k or top-p cuts. Tokens equal to the last one kept are kept."""
    ranked = chosen.sort(-1, descending=True).values.double() / settings.temperature[:, None] - top
    top_k = ranked.gather(1, settings.top_k[:, None] - 1)
    mass = torch.where(ranked >= top_k, torch.exp(ranked), 0.0).cumsum(-1)
    wanted = settings.top_p[:, None] * mass[:, -1:]
    last = torch.searchsorted(mass, wanted).clamp_max(ranked.shape[1] - 1)
    top_p = ranked.gather(1, last) - 1e-12
    # top_p = 1 keeps every token, the least likely one included.
    return torch.where(settings.top_p[:, None] < 1, torch.maximum(top_k, top_p), top_k)


@dataclass(frozen=True, slots=True)
class Guesses:
    """What `propose` needs from each row of logits, on the host. One entry per row."""

    token_ids: list[int]
    confidence: list[float]
    ratio: dict[int, tuple[list[int], list[int]]]
    """For each row sampled in ratio mode: token ids and nonzero counts of q, likeliest first."""
    others: list[tuple[tuple[int, float], ...]]
    """Alternatives, as (token id, chance). Meaningless in ratio mode."""


def guess_batched(
    logits: Tensor,
    params: Sequence[SamplingParams],
    modes: Sequence[VerificationMode],
    positions: Sequence[int],
    token_map: Tensor | None = None,
    num_others: int = 0,
) -> Guesses:
    """What `propose` chooses from. One copy to the device when any row is sampled, and one from it."""
    best = logits.softmax(-1).topk(min(1 + num_others, logits.shape[-1]))
    # [rows, 1 + others]
    tokens, confidence = best.indices.clone(), best.values.double()
    coupled, ratio = _Sampled(), _Sampled()
    for row, (settings, mode, position) in enumerate(zip(params, modes, positions, strict=True)):
        if settings.greedy or mode is VerificationMode.GREEDY:
            continue
        (ratio if mode is VerificationMode.RATIO else coupled).add(row, settings)
        if mode is VerificationMode.COUPLED:
            coupled.keys.append(gumbel_key(settings.seed, position))
    for part in _chunks(_send(coupled, logits)) if coupled else ():
        probs = probabilities(logits, best.indices[:, 0], part)
        scores = _gumbel_scores(probs, part.more["keys"], token_map)
        drawn = scores.softmax(-1).topk(tokens.shape[1])
        tokens[part.rows], confidence[part.rows] = drawn.indices, drawn.values
        confidence[part.rows, 0] = probs.gather(1, drawn.indices[:, :1])[:, 0]
    counts = []
    for part in _chunks(_send(ratio, logits)) if ratio else ():
        counts.append(_quantized(probabilities(logits, best.indices[:, 0], part), token_map))
    named = tokens if token_map is None else token_map[tokens]
    parts = [named, confidence.view(torch.int64), *counts]
    packed = torch.cat([part.reshape(-1) for part in parts]).cpu()
    size = named.numel()
    ids = packed[:size].view(named.shape).tolist()
    chances = packed[size : 2 * size].view(torch.float64).view(named.shape).tolist()
    tables = packed[2 * size :].view(len(ratio.rows), 2, -1).tolist() if ratio else []
    return Guesses(
        [row[0] for row in ids],
        [row[0] for row in chances],
        {row: _without_zeros(ids, shares) for row, (ids, shares) in zip(ratio.rows, tables, strict=True)},
        [
            tuple((one, chance) for one, chance in zip(row[1:], of[1:], strict=True) if chance > 0)
            for row, of in zip(ids, chances, strict=True)
        ],
    )


def _quantized(probs: Tensor, token_map: Tensor | None) -> Tensor:
    """int64 [rows, 2, at most Q_WIDTH]: token ids and counts, as `quantize`; a count is 0 if p is 0."""
    top = probs.topk(min(Q_WIDTH, probs.shape[1]), -1)
    shares = top.values / top.values.sum(-1, keepdim=True)
    counts = torch.where(shares > 0, (shares * Q_TOTAL).floor().long().clamp_min(1), 0)
    counts[:, 0] += Q_TOTAL - counts.sum(-1)
    ids = top.indices if token_map is None else token_map[top.indices]
    return torch.stack((ids, counts), 1)


def _without_zeros(ids: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    kept = [number for number, count in enumerate(counts) if count]
    return [ids[number] for number in kept], [counts[number] for number in kept]


def _choose_coupled(logits: Tensor, favourites: Tensor, sampled: _Sampled, tokens: Tensor) -> None:
    for part in _chunks(_send(sampled, logits)):
        probs = probabilities(logits, favourites, part)
        tokens[part.rows] = _gumbel_scores(probs, part.more["keys"], None).argmax(-1)


def _gumbel_scores(probs: Tensor, keys: Tensor, token_map: Tensor | None) -> Tensor:
    """log p + G, of probs [rows, width]. log(0) is -inf, which never wins."""
    ids = torch.arange(probs.shape[1], device=probs.device) if token_map is None else token_map
    return probs.log() + gumbel_of(keys[:, None], ids)


def _verify_ratio(logits: Tensor, favourites: Tensor, sampled: _Sampled, tokens: Tensor, accepted: Tensor) -> None:
    for part in _chunks(_send(sampled, logits)):
        p, more = probabilities(logits, favourites, part), part.more
        accepted[part.rows] = (more["bound"] < p.gather(1, more["drafted"][:, None])[:, 0]).long()
        tokens[part.rows] = _draw(_residual(p, more["q_ids"], more["q_counts"]), more["draw"])


def _residual(p: Tensor, q_ids: Tensor, q_counts: Tensor) -> Tensor:
    """max(p - q, 0), not normalised. p itself if that is 0 everywhere: p = q up to rounding, or there is no q."""
    residual = p.scatter_add(1, q_ids, -q_counts.double() / Q_TOTAL).clamp_min_(0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """[rows]: the token at quantile u [rows] of weights [rows, vocab]. Never a token of weight 0."""
    # A device sums in parallel, so the running sum may drop by its last bit where weights are 0; cummax prevents that.
    mass = torch.where(weights > 0, weights.cumsum(-1), 0.0).cummax(-1).values
    index = torch.searchsorted(mass, u[:, None] * mass[:, -1:], right=True)[:, 0]
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).long().argmax(-1)
    return torch.minimum(index, last)
