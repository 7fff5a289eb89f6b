"""Proposes and verifies many rows at once. For GPUs, where every read of a value waits for the device.

The rules and the noise are those of `verification.py`, `proposals.py` and `sampling.py`, which work row by row. All
inputs go to the device in one copy, and all results come back in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, Q_WIDTH, SamplingParams, VerificationMode
from outrider.speculation.candidates import Candidate, NotFinite, Verdict
from outrider.speculation.changes import Changes
from outrider.speculation.columns import Columns
from outrider.speculation.logprobs import add_logprobs, asked_rows, logprob_table
from outrider.speculation.noise import Purpose, gumbel_key, gumbel_of, uniform

# Rows that are sampled at once, which bounds memory: several float64 tensors over the vocabulary.
_CHUNK = 64


def verify_batched(logits: Tensor, candidates: Sequence[Candidate]) -> list[Verdict]:
    """As verify. One copy to the device when any row is sampled or processed, and one from it."""
    changes, sampled_rows, asked = Changes(candidates), _SampledRows.of(candidates), asked_rows(candidates)
    columns = Columns()
    changes.lay_out(columns)
    sampled_rows.lay_out(columns, logits.shape[1])
    if asked:
        columns.add(asked=np.array(asked))
    sent = columns.send(logits.device)
    unprocessed = logits[sent["asked"]] if asked else logits
    changes.apply(logits, sent)
    best = logits.max(-1)
    # The target's token for each row; whether the row's drafted token is accepted, in ratio mode; what the row emits.
    tokens, accepted = best.indices.clone(), torch.zeros_like(best.indices)
    if sampled_rows.coupled:
        _choose_coupled(logits, best.indices, sampled_rows.coupled.settings(sent), tokens)
    emitted = tokens
    if sampled_rows.ratio:
        emitted = tokens.clone()
        _verify_ratio(logits, best.indices, sampled_rows.ratio.settings(sent), tokens, accepted, emitted)
    # The maximum is not finite where a logit is NaN or +inf, or all are -inf.
    results = [tokens, accepted, torch.isfinite(best.values).long()]
    if asked:
        results.append(logprob_table(unprocessed, emitted[sent["asked"]]).flatten())
    found, table = _split(torch.cat(results).cpu(), 3 * len(tokens), len(asked))
    own, accept, finite = found.view(3, -1).tolist()
    if not all(finite):
        raise NotFinite("logits")
    verdicts, start = [], 0
    for candidate in candidates:
        rows = slice(start, start + candidate.num_rows)
        verdicts.append(_walk(candidate, own[rows], accept[rows]))
        start += candidate.num_rows
    for number, at in changes.refused.items():
        verdicts[number].cut_before(at.row, at.error)
    if asked:
        add_logprobs(candidates, verdicts, table)
    return verdicts


def _split(results: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """The first `count` numbers, and the rest as a table of so many rows."""
    return results[:count], results[count:].view(rows, -1) if rows else results[count:]


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

    name: str
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

    def lay_out(self, columns: Columns, width: int) -> None:
        """`width`: of the logits."""
        found: dict[str, np.ndarray] = {
            "rows": np.array(self.rows, dtype=np.int64),
            "temperature": np.array([p.temperature or 1.0 for p in self.params]),
            "top_k": np.array([p.top_k if 0 < p.top_k < width else width for p in self.params]),
            "top_p": np.array([p.top_p for p in self.params]),
            "log_min_p": np.log(np.array([max(p.min_p, 1e-300) for p in self.params])),
            "greedy": np.array([p.greedy for p in self.params]),
        }
        if self.keys:
            found["keys"] = np.array(self.keys, dtype=np.int64)
        if self.bound:
            found |= {"drafted": np.array(self.drafted), "bound": np.array(self.bound), "draw": np.array(self.draw)}
            found |= {"q_ids": _padded(self.q_ids), "q_counts": _padded(self.q_counts)}
        columns.add(**{f"{self.name}.{name}": column for name, column in found.items()})

    def settings(self, sent: Mapping[str, Tensor]) -> Settings:
        """What was laid out, on the device."""
        mark = f"{self.name}."
        columns = {name.removeprefix(mark): each for name, each in sent.items() if name.startswith(mark)}
        named = {name: columns.pop(name) for name in ("rows", "temperature", "top_k", "top_p", "log_min_p", "greedy")}
        sorts = any(p.top_p < 1 or p.top_k > 0 for p in self.params)
        return Settings(**named, more=columns, sorts=sorts)


@dataclass(slots=True)
class _SampledRows:
    """The candidates' rows, by verification rule. Greedy rows need no entry."""

    coupled: _Sampled = field(default_factory=lambda: _Sampled("coupled"))
    ratio: _Sampled = field(default_factory=lambda: _Sampled("ratio"))

    def lay_out(self, columns: Columns, width: int) -> None:
        for sampled in (self.coupled, self.ratio):
            if sampled:
                sampled.lay_out(columns, width)

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
    sampled = _SampledRows()
    coupled, ratio = sampled.coupled, sampled.ratio
    for row, (settings, mode, position) in enumerate(zip(params, modes, positions, strict=True)):
        if settings.greedy or mode is VerificationMode.GREEDY:
            continue
        (ratio if mode is VerificationMode.RATIO else coupled).add(row, settings)
        if mode is VerificationMode.COUPLED:
            coupled.keys.append(gumbel_key(settings.seed, position))
    columns = Columns()
    sampled.lay_out(columns, logits.shape[1])
    sent = columns.send(logits.device)
    for part in _chunks(coupled.settings(sent)) if coupled else ():
        probs = probabilities(logits, best.indices[:, 0], part)
        scores = _gumbel_scores(probs, part.more["keys"], token_map)
        drawn = scores.softmax(-1).topk(tokens.shape[1])
        tokens[part.rows], confidence[part.rows] = drawn.indices, drawn.values
        confidence[part.rows, 0] = probs.gather(1, drawn.indices[:, :1])[:, 0]
    counts = []
    for part in _chunks(ratio.settings(sent)) if ratio else ():
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


def _choose_coupled(logits: Tensor, favourites: Tensor, settings: Settings, tokens: Tensor) -> None:
    for part in _chunks(settings):
        probs = probabilities(logits, favourites, part)
        tokens[part.rows] = _gumbel_scores(probs, part.more["keys"], None).argmax(-1)


def _gumbel_scores(probs: Tensor, keys: Tensor, token_map: Tensor | None) -> Tensor:
    """log p + G, of probs [rows, width]. log(0) is -inf, which never wins."""
    ids = torch.arange(probs.shape[1], device=probs.device) if token_map is None else token_map
    return probs.log() + gumbel_of(keys[:, None], ids)


def _verify_ratio(
    logits: Tensor, favourites: Tensor, settings: Settings, tokens: Tensor, accepted: Tensor, emitted: Tensor
) -> None:
    for part in _chunks(settings):
        p, more = probabilities(logits, favourites, part), part.more
        accept = more["bound"] < p.gather(1, more["drafted"][:, None])[:, 0]
        accepted[part.rows] = accept.long()
        tokens[part.rows] = _draw(_residual(p, more["q_ids"], more["q_counts"]), more["draw"])
        emitted[part.rows] = torch.where(accept, more["drafted"], tokens[part.rows])


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
