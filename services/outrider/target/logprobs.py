"""Log probabilities for the rows of a step whose requests ask for them, from the model's own, unprocessed logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.speculation import Verdict
from outrider.speculation.logprobs import logprobs_of
from outrider.target.scheduler import PlannedRow


def num_prompt_rows(row: PlannedRow) -> int:
    """Rows of logits for tokens of the prompt; they come before those that are verified."""
    if not row.sequence.wants_prompt_logprobs:
        return 0
    return row.num_tokens - row.decides


def take_prompt(rows: Sequence[PlannedRow], logits: Tensor) -> Tensor:
    """Stores the log probabilities of prompts in their sequences. Returns the rows that are verified."""
    counts = [num_prompt_rows(row) for row in rows]
    if not any(counts):
        return logits
    kept, start = [], 0
    for row, count in zip(rows, counts, strict=True):
        sequence = row.sequence
        if count:
            # The engine has run the step by now, so its committed tokens count as cached.
            first = sequence.cached_len - row.num_tokens
            token_ids = sequence.opening.prompt[first + 1 : first + 1 + count]
            assert sequence.opening.logprobs is not None
            assert sequence.prompt_report is not None
            # A step that failed is run again: its first results are replaced.
            found = logprobs_of(logits[start : start + count], token_ids, sequence.opening.logprobs.num_top)
            sequence.prompt_report.logprobs[first:] = found
        start += count
        end = start + (len(row.draft) + 1 if row.decides else 0)
        kept.append(logits[start:end])
        start = end
    return torch.cat(kept)


def asked_rows(deciding: Sequence[PlannedRow], logits: Tensor) -> dict[int, Tensor]:
    """The logits of each row that asks for them, by its index in `deciding`; a copy if verification will change
    them."""
    if all(row.sequence.opening.logprobs is None for row in deciding):
        return {}
    found, start = {}, 0
    for number, row in enumerate(deciding):
        end = start + len(row.draft) + 1
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
        rows = [0, *verdict.path]
        verdict.logprobs = logprobs_of(logits[rows], verdict.token_ids, options.num_top)
