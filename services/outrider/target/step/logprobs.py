"""Log probabilities of prompts, for the rows of a step whose requests ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.speculation.logprobs import logprobs_of
from outrider.target.step.scheduler import PlannedRow


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
