"""Log probabilities of tokens, from the model's own logits: before temperature, penalties and masks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.options.logprobs import MAX_TOP_LOGPROBS, TokenLogprobs
from outrider.speculation.candidates import Candidate


def logprobs_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """logits [rows, vocab]; row i is that of token i."""
    table = logprob_table(logits, torch.tensor(token_ids, device=logits.device)).cpu()
    return _read(table, [num_top] * len(token_ids))


def logprob_table(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [rows, numbers], from which `read_logprobs` reads: in one piece, so that one copy brings all."""
    logprobs = torch.log_softmax(logits.float(), -1)
    # As many as any may ask for: of equally likely ones, which come first must not depend on the neighbours in a step.
    top = logprobs.topk(min(MAX_TOP_LOGPROBS, logprobs.shape[1]))
    chosen = logprobs.gather(1, token_ids[:, None])
    return torch.cat([torch.cat([chosen, top.values], 1).double().view(torch.int64), top.indices], 1)


def asked_rows(candidates: Sequence[Candidate]) -> list[int]:
    """The rows of logits whose log probabilities are asked for, in order."""
    found, start = list[int](), 0
    for candidate in candidates:
        if candidate.num_top is not None:
            found += range(start, start + candidate.num_rows)
        start += candidate.num_rows
    return found


def add_logprobs(candidates: Sequence[Candidate], table: Tensor) -> None:
    """Adds those of its tokens to each that asks for them. `table`: of the asked rows."""
    rows, num_top, start = list[int](), list[int](), 0
    asking = [candidate for candidate in candidates if candidate.num_top is not None]
    for candidate in asking:
        rows += [start + row for row in candidate.emitting]
        num_top += [candidate.num_top or 0] * len(candidate.token_ids)
        start += candidate.num_rows
    found = iter(_read(table[rows], num_top))
    for candidate in asking:
        candidate.top = [next(found) for _ in candidate.token_ids]


def _read(table: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    most = table.shape[1] // 2
    values, ids = table[:, : most + 1].contiguous().view(torch.float64).tolist(), table[:, most + 1 :].tolist()
    return [
        TokenLogprobs(row[0], tuple(at[:count]), tuple(row[1 : count + 1]))
        for row, at, count in zip(values, ids, num_top, strict=True)
    ]
