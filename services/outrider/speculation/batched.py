"""Proposes and verifies many rows at once. For GPUs, where every read of a value waits for the device.

The rules and the noise are those of `verification.py`, `proposals.py` and `sampling.py`, which work row by row. All
inputs go to the device in one copy, and all results come back in one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq

import numpy as np
import torch
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, Q_WIDTH, SamplingParams, VerificationMode
from outrider.speculation.candidates import Candidate, NotFinite
from outrider.speculation.changes import Changes
from outrider.speculation.choosing import NOT_FINITE, UNSURE, choose, choose_row, guess
from outrider.speculation.columns import Columns
from outrider.speculation.logprobs import add_logprobs, asked_rows, logprob_table
from outrider.speculation.sampled_rows import Sampled
from outrider.tree import ROOT


def verify_batched(logits: Tensor, candidates: Sequence[Candidate]) -> None:
    """As verify. One copy to the device when any row is sampled or processed, and one from it; two in the rare step in
    which float32 does not tell which token a row chooses."""
    changes, sampled, asked = Changes(candidates), Sampled.of(candidates), asked_rows(candidates)
    columns = Columns()
    changes.lay_out(columns)
    sampled.lay_out(columns, *logits.shape)
    if asked:
        columns.add(asked=np.array(asked))
    sent = columns.send(logits.device)
    unprocessed = logits[sent["asked"]] if asked else None
    chosen = choose(logits, sent)
    results = [chosen.flatten()]
    if unprocessed is not None:
        results.append(logprob_table(unprocessed, chosen[sent["asked"], 0]).flatten())
    numbers = (torch.cat(results) if asked else results[0]).cpu()
    count = chosen.numel()
    own, states = numbers[:count].view(-1, 2).T.tolist()
    table = numbers[count:]
    if NOT_FINITE in states:
        raise NotFinite("logits")
    if UNSURE in states:
        _choose_again(logits, candidates, own, states)
        if unprocessed is not None:
            tokens = torch.tensor([own[row] for row in asked], device=logits.device)
            table = logprob_table(unprocessed, tokens).cpu()
    start = 0
    for candidate in candidates:
        rows = own[start : start + candidate.num_rows]
        if candidate.draft.parents:
            walk(candidate, rows.__getitem__)
        else:
            _walk_chain(candidate, rows)
        start += candidate.num_rows
    for number, at in changes.refused.items():
        candidates[number].cut_before(at.row, at.error)
    if asked:
        add_logprobs(candidates, table.view(len(asked), -1))


def _choose_again(logits: Tensor, candidates: Sequence[Candidate], own: list[int], states: Sequence[int]) -> None:
    """By the rule itself, for the rows of which float32 does not tell enough."""
    unsure = [row for row, state in enumerate(states) if state == UNSURE]
    of_row = [(candidate, place) for candidate in candidates for place in range(candidate.num_rows)]
    for row, values in zip(unsure, logits[unsure].cpu(), strict=True):
        own[row] = choose_row(*of_row[row], values)


def walk(candidate: Candidate, own: Callable[[int], int]) -> None:
    """From each row's own token to what is accepted. Of a row that is not reached none is asked for."""
    draft, node, num_verified, tokens, accepted = candidate.draft, ROOT, 0, list[int](), list[int]()
    following = draft.children()
    while True:
        token_id, children = own(node + 1), following[node + 1]
        num_verified += bool(children)
        tokens.append(token_id)
        match = next((child for child in children if draft.token_ids[child] == token_id), None)
        if match is None:
            break
        accepted.append(match)
        node = match
    candidate.decide(tokens, accepted, num_verified)


def _walk_chain(candidate: Candidate, own: Sequence[int]) -> None:
    draft = candidate.draft.token_ids
    count = [*map(eq, draft, own), False].index(False)
    candidate.decide(own[: count + 1], range(count), min(count + 1, len(draft)))


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
    count = min(1 + num_others, logits.shape[-1])
    sampled, ratio = Sampled(), list[int]()
    for row, (settings, mode, position) in enumerate(zip(params, modes, positions, strict=True)):
        if is_sampled(settings, mode):
            sampled.add([row], settings, [position])
        if is_drawn(settings, mode):
            ratio.append(row)
    columns = Columns()
    sampled.lay_out(columns, *logits.shape)
    if ratio:
        columns.add(ratio=np.array(ratio), temperatures=np.array([params[row].temperature for row in ratio]))
    sent = columns.send(logits.device)
    found = guess(logits, sent, token_map, count)
    results = [found.flatten()]
    if ratio:
        rows = sent["ratio"]
        results.append(quantized(logits[rows], found[rows, :1], sent["temperatures"], token_map).flatten())
    numbers = (torch.cat(results) if ratio else results[0]).cpu()
    tables = numbers[found.numel() :].long().view(len(ratio), 2, -1) if ratio else ()
    return guesses_of(numbers[: found.numel()].view(found.shape), dict(zip(ratio, tables, strict=True)))


def is_sampled(params: SamplingParams, mode: VerificationMode) -> bool:
    return not params.greedy and mode is not VerificationMode.GREEDY


def is_drawn(params: SamplingParams, mode: VerificationMode) -> bool:
    """Whether a token is drawn from q."""
    return not params.greedy and mode is VerificationMode.RATIO


def guesses_of(rows: Tensor, tables: Mapping[int, Tensor]) -> Guesses:
    """rows: what `guess` finds; tables: what `quantized` finds for those that are drawn, int64. Both on the host."""
    count = rows.shape[1] // 2
    ids, chances = rows[:, 1 : 1 + count].long().tolist(), rows[:, 1 + count :].tolist()
    return Guesses(
        [row[0] for row in ids],
        [row[0] for row in chances],
        {row: _without_zeros(*table.tolist()) for row, table in tables.items()},
        [
            tuple((one, chance) for one, chance in zip(row[1:], of[1:], strict=True) if chance > 0)
            for row, of in zip(ids, chances, strict=True)
        ],
    )


def quantized(logits: Tensor, floors: Tensor, temperatures: Tensor, token_map: Tensor | None) -> Tensor:
    """float64 [rows, 2, at most Q_WIDTH]: token ids and counts, as `quantize`; a count is 0 if p is 0."""
    top = logits.float().topk(min(Q_WIDTH, logits.shape[1]))
    scaled = top.values.double() / temperatures[:, None]
    weights = torch.where(top.values >= floors, (scaled - scaled[:, :1]).exp(), 0.0)
    shares = weights / weights.sum(-1, keepdim=True)
    counts = torch.where(shares > 0, (shares * Q_TOTAL).floor().clamp_min(1), 0.0)
    counts[:, 0] += Q_TOTAL - counts.sum(-1)
    return torch.stack((top.indices if token_map is None else token_map[top.indices], counts), 1)


def _without_zeros(ids: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    kept = [number for number, count in enumerate(counts) if count]
    return [ids[number] for number in kept], [counts[number] for number in kept]
