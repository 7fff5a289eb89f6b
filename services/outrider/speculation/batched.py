"""Proposes and verifies many rows at once. For GPUs, where every read of a value waits for the device.

The rules and the noise are those of `verification.py`, `proposals.py` and `sampling.py`, which work row by row. All
inputs go to the device in one copy, and all results come back in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, Q_WIDTH, SamplingParams, VerificationMode
from outrider.speculation.candidates import Candidate, NotFinite, Verdict
from outrider.speculation.changes import Changes
from outrider.speculation.choosing import Shortlist, accept, choose, likeliest, shortlist
from outrider.speculation.columns import Columns
from outrider.speculation.logprobs import add_logprobs, asked_rows, logprob_table
from outrider.speculation.noise import gumbel_of
from outrider.speculation.sampled_rows import Sampled, SampledRows, Settings
from outrider.tree import ROOT, DraftTree


def verify_batched(logits: Tensor, candidates: Sequence[Candidate]) -> list[Verdict]:
    """As verify. One copy to the device when any row is sampled or processed, and one from it; two in the rare step in
    which a choice is not certain."""
    changes, sampled, asked = Changes(candidates), SampledRows.of(candidates), asked_rows(candidates)
    columns = Columns()
    changes.lay_out(columns)
    sampled.lay_out(columns, logits.shape[1])
    if asked:
        columns.add(asked=np.array(asked))
    sent = columns.send(logits.device)
    unprocessed = logits[sent["asked"]] if asked else None
    changes.apply(logits, sent)
    decided = _decide(logits, unprocessed, sampled, sent, exactly=False)
    if not decided.certain:
        decided = _decide(logits, unprocessed, sampled, sent, exactly=True)
    if not decided.finite:
        raise NotFinite("logits")
    verdicts, start = [], 0
    for candidate in candidates:
        rows = slice(start, start + candidate.num_rows)
        verdicts.append(_walk(candidate.draft, decided.tokens[rows]))
        start += candidate.num_rows
    for number, at in changes.refused.items():
        verdicts[number].cut_before(at.row, at.error)
    if asked:
        add_logprobs(candidates, verdicts, decided.logprobs.view(len(asked), -1))
    return verdicts


class _Decided(NamedTuple):
    """On the host."""

    tokens: list[int]
    """Of each row: the target's own; in ratio mode the drafted one where that is accepted."""
    finite: bool
    certain: bool
    """Whether all choices in float64 over the whole vocabulary are sure to be the same."""
    logprobs: Tensor
    """Of the rows that ask for them: their table, flat."""


def _decide(
    logits: Tensor, unprocessed: Tensor | None, sampled: SampledRows, sent: Mapping[str, Tensor], *, exactly: bool
) -> _Decided:
    best, width = logits.max(-1), logits.shape[1]
    tokens = best.indices
    # The maximum is not finite where a logit is NaN or +inf, or all are -inf: then it is NaN if multiplied by 0.
    sure = [(best.values * 0).sum() == 0]
    for part in _parts(sampled.coupled, sent, width, wide=not exactly):
        tokens[part.rows], certain = choose(logits, best.values, part, exactly=exactly)
        sure.append(certain.all())
    for part in _parts(sampled.ratio, sent, width, wide=not exactly):
        tokens[part.rows], certain = accept(logits, best.values, part, exactly=exactly)
        sure.append(certain.all())
    results = [tokens, torch.stack(sure)]
    if unprocessed is not None:
        results.append(logprob_table(unprocessed, tokens[sent["asked"]]).flatten())
    numbers, count = torch.cat(results).cpu(), len(tokens)
    finite, *certain_parts = numbers[count : count + len(sure)].tolist()
    return _Decided(numbers[:count].tolist(), bool(finite), all(certain_parts), numbers[count + len(sure) :])


def _parts(
    groups: Iterable[Sampled], sent: Mapping[str, Tensor], width: int, *, wide: bool = True
) -> Iterator[Settings]:
    for sampled in filter(None, groups):
        yield from sampled.settings(sent).chunks(width, wide=wide)


def _walk(draft: DraftTree, own: Sequence[int]) -> Verdict:
    """From each row's own token to the verdict."""
    if not draft.parents:
        return _walk_chain(draft.token_ids, own)
    verdict, node, following = Verdict(), ROOT, draft.children()
    while True:
        children = following[node + 1]
        verdict.num_verified += bool(children)
        match = next((child for child in children if draft.token_ids[child] == own[node + 1]), None)
        verdict.token_ids.append(own[node + 1] if match is None else draft.token_ids[match])
        if match is None:
            return verdict
        verdict.num_accepted += 1
        verdict.path.append(match + 1)
        node = match


def _walk_chain(draft: Sequence[int], own: Sequence[int]) -> Verdict:
    count = [*map(eq, draft, own), False].index(False)
    return Verdict(list(own[: count + 1]), count, min(count + 1, len(draft)), list(range(1, count + 1)))


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
    sampled = SampledRows()
    for row, (settings, mode, position) in enumerate(zip(params, modes, positions, strict=True)):
        if settings.greedy or mode is VerificationMode.GREEDY:
            continue
        if mode is VerificationMode.RATIO:
            sampled.ratio[True].add([row], settings)
        else:
            sampled.add_coupled([row], settings, [position])
    columns, width, ratio = Columns(), logits.shape[1], sampled.ratio[True]
    sampled.lay_out(columns, width)
    sent = columns.send(logits.device)
    # Where the likeliest tokens do not reach top-p, a draft is content with them: any q is exact.
    for part in _parts(sampled.coupled, sent, width):
        tokens[part.rows], confidence[part.rows] = _noisiest(logits, part, token_map, tokens.shape[1])
    counts = [_quantized(likeliest(logits, part), token_map) for part in _parts([ratio], sent, width)]
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


def _noisiest(logits: Tensor, settings: Settings, token_map: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """[rows, count]: the logits with the greatest scores, and their chances, as _draw_coupled has them."""
    tops = logits.amax(-1)
    found = shortlist(logits, tops, settings, token_map, least=count)
    named = found.token_ids if token_map is None else token_map[found.token_ids]
    weights = found.kept(found.floors[0])
    scores = weights.log() + gumbel_of(settings.more["keys"][:, None], named)
    top = scores.topk(count)
    of_all = scores if found.scores is None else found.scores
    chances = (top.values - of_all.logsumexp(-1, keepdim=True)).exp()
    _, mass = found.masses(logits, tops, settings)[0]
    chances[:, :1] = weights.gather(1, top.indices[:, :1]) / mass
    return found.token_ids.gather(1, top.indices), chances


def _quantized(found: Shortlist, token_map: Tensor | None) -> Tensor:
    """int64 [rows, 2, at most Q_WIDTH]: token ids and counts, as `quantize`; a count is 0 if p is 0."""
    weights, ids = found.kept(found.floors[0])[:, :Q_WIDTH], found.token_ids[:, :Q_WIDTH]
    shares = weights / weights.sum(-1, keepdim=True)
    counts = torch.where(shares > 0, (shares * Q_TOTAL).floor().long().clamp_min(1), 0)
    counts[:, 0] += Q_TOTAL - counts.sum(-1)
    return torch.stack((ids if token_map is None else token_map[ids], counts), 1)


def _without_zeros(ids: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    kept = [number for number, count in enumerate(counts) if count]
    return [ids[number] for number in kept], [counts[number] for number in kept]
