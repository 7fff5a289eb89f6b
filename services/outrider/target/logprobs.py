"""Which rows of a step's logits are asked after, and what is said of them. They are the model's own, untouched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.speculation import Verdict
from outrider.speculation.logprobs import logprobs_of
from outrider.target.scheduler import PlannedRow


def num_prompt_rows(row: PlannedRow) -> int:
    """Rows of logits for tokens of the prompt; they come before those that are judged."""
    if not row.sequence.wants_prompt_logprobs:
        return 0
    return row.num_tokens - row.decides


def take_prompt(rows: Sequence[PlannedRow], logits: Tensor) -> Tensor:
    """Notes with their sequences what is said of prompts. Returns the rows that are judged."""
    counts = [num_prompt_rows(row) for row in rows]
    if not any(counts):
        return logits
    kept, start = [], 0
    for row, count in zip(rows, counts, strict=True):
        sequence = row.sequence
        if count:
            # Before the step's tokens count as cached, or after them: the engine has moved on by now.
            first = sequence.cached_len - row.num_tokens - row.num_drafted
            token_ids = sequence.opening.prompt[first + 1 : first + 1 + count]
            assert sequence.opening.logprobs is not None
            # A step that failed is run again: what it said before is replaced.
            found = logprobs_of(logits[start : start + count], token_ids, sequence.opening.logprobs.num_top)
            sequence.prompt_logprobs[first:] = found
        start += count
        end = start + (row.num_drafted + 1 + len(row.siblings) if row.decides else 0)
        kept.append(logits[start:end])
        start = end
    return torch.cat(kept)


def asked_rows(deciding: Sequence[PlannedRow], logits: Tensor) -> dict[int, Tensor]:
    """By number of the row in `deciding`: its logits, kept from what is done with them afterwards."""
    if all(row.sequence.opening.logprobs is None for row in deciding):
        return {}
    found, start = {}, 0
    for number, row in enumerate(deciding):
        end = start + row.num_drafted + 1 + len(row.siblings)
        if row.sequence.opening.logprobs is not None:
            own = logits[start:end]
            found[number] = own.clone() if row.sequence.processor is not None else own
        start = end
    return found


def add_logprobs(deciding: Sequence[PlannedRow], asked: dict[int, Tensor], verdicts: Sequence[Verdict]) -> None:
    for number, logits in asked.items():
        verdict, options = verdicts[number], deciding[number].sequence.opening.logprobs
        assert options is not None
        if verdict.error is not None:
            continue
        # One row fewer than it has where nothing of its own follows the last accepted token.
        rows = [0, *verdict.path][: len(verdict.token_ids)]
        verdict.logprobs = logprobs_of(logits[rows], verdict.token_ids, options.num_top)
