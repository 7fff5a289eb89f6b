"""Chooses the tokens of drafts one after another on a GPU, without the host between them.

The rules are those of `guess_batched`. All that decides but the logits is known before the first token is: it is laid
out for each step, in columns of one number of 8 bytes a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, SamplingParams, VerificationMode
from outrider.speculation.batched import guesses_of, is_drawn, is_sampled, quantized
from outrider.speculation.choosing import guess
from outrider.speculation.noise import Purpose, uniform
from outrider.speculation.proposals import Proposal, proposals_of
from outrider.speculation.sampled_rows import Sampled

COLUMNS = {"numbers": 1, "reals": 4, "integers": 3, "points": 1}
"""How many columns there are of each name. points: where a row's draw falls in the counts of q; -1: it draws none."""


def lay_out(
    columns: Mapping[str, NDArray[np.int64]],
    params: Sequence[SamplingParams],
    modes: Sequence[VerificationMode],
    positions: Sequence[int],
    width: int,
) -> None:
    """Of one step: the rows after those of `params` are padding. positions: of the tokens. width: of the logits."""
    columns["numbers"][:] = columns["points"][:] = -1
    sampled = Sampled()
    for row, (settings, mode, position) in enumerate(zip(params, modes, positions, strict=True)):
        if is_sampled(settings, mode):
            sampled.add([row], settings, [position])
        if is_drawn(settings, mode):
            columns["points"][row] = int(uniform(settings.seed, position, Purpose.DRAFT) * Q_TOTAL)
    if not sampled:
        return
    found, count = sampled.columns(len(params), width), len(sampled.rows)
    columns["numbers"][: len(params)] = found["numbers"]
    for name in ("reals", "integers"):
        columns[name].reshape(COLUMNS[name], -1)[:, :count] = found[name].view(np.int64)


def choose_next(
    logits: Tensor, columns: Mapping[str, Tensor], token_map: Tensor | None, num_others: int, *, drawn: bool
) -> Tensor:
    """float64 [rows, …]: what `guess` finds, and where rows may be drawn, the ids and counts of q. The row's own token
    is the second number. columns: as lay_out has them, on the device."""
    reals = columns["reals"].view(torch.float64).view(COLUMNS["reals"], -1)
    sent = {
        "numbers": columns["numbers"],
        "reals": reals,
        "integers": columns["integers"].view(COLUMNS["integers"], -1),
    }
    found = guess(logits, sent, token_map, min(1 + num_others, logits.shape[-1]))
    if not drawn:
        return found
    points = columns["points"][:, None]
    temperatures = torch.where(points[:, 0] >= 0, reals[0].gather(0, columns["numbers"].clamp_min(0)), 1.0)
    ids, counts = quantized(logits, found[:, :1], temperatures, token_map).unbind(1)
    place = (counts.cumsum(-1) <= points).sum(-1, keepdim=True).clamp_max(ids.shape[-1] - 1)
    token = torch.where(points >= 0, ids.gather(1, place), found[:, 1:2])
    return torch.cat([found[:, :1], token, found[:, 2:], ids, counts], 1)


def proposals(
    found: Tensor,
    params: Sequence[SamplingParams],
    modes: Sequence[VerificationMode],
    positions: Sequence[int],
    num_others: int,
) -> Iterator[list[Proposal]]:
    """Of each step, of each row. found [steps, rows, …] on the host; positions: of the first step's tokens."""
    width = 3 + 2 * num_others
    ratio = [row for row, pair in enumerate(zip(params, modes, strict=True)) if is_drawn(*pair)]
    for step, of_rows in enumerate(found):
        guesses = guesses_of(of_rows[:, :width], {row: of_rows[row, width:].long().view(2, -1) for row in ratio})
        yield proposals_of(guesses, params, modes, [position + step for position in positions])
