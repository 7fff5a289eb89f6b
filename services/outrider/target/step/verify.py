"""Runs planned rows through the model and verifies their drafts.

When a step fails, its halves are run apart until one row is found at fault: only that sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine import DeviceLost, Engine, EngineSequence, OutOfBlocks, Row
from outrider.speculation import MaskLate, verify
from outrider.speculation.logprobs import logprobs_of
from outrider.target.step.scheduler import TargetRow
from outrider.target.step.sequence import TargetSequence


def verify_rows(engine: Engine, rows: Sequence[TargetRow], taps: tuple[int, ...] = ()) -> None:
    """Fills in each row. A row that failed keeps its earlier KV; the others are not affected. taps:
    the layers whose states are wanted too, as Engine.forward_tapped has them.

    Raises OutOfBlocks, with nothing changed, when the pool cannot hold the rows, and DeviceLost.
    """
    try:
        _run(engine, rows, taps)
    except (OutOfBlocks, DeviceLost):
        raise
    except Exception as error:
        for row in rows:
            engine.kv.retract(kv_of(row.sequence), row.start)
        if len(rows) > 1:
            middle = len(rows) // 2
            verify_rows(engine, rows[:middle], taps)
            for row in rows[:middle]:
                # A recorded step writes to the same memory.
                row.states = None if row.states is None else row.states.clone()
            verify_rows(engine, rows[middle:], taps)
        elif rows[0].draft.token_ids:
            # The draft may be what fails, and it only affects latency: try once more without it.
            rows[0].drop_draft()
            verify_rows(engine, rows, taps)
        else:
            rows[0].cut_before(0, error)
            rows[0].raised = True


def _run(engine: Engine, rows: Sequence[TargetRow], taps: tuple[int, ...]) -> None:
    logits = take_prompt(rows, _forward(engine, rows, taps))
    deciding = [row for row in rows if row.decides]
    if deciding:
        verify(logits, deciding)
    for row in deciding:
        # Another error is a request that cannot be served, and no fault of the model: nothing is run again.
        if isinstance(row.error, MaskLate):
            # The same row comes again in a later step.
            row.error = None
            engine.kv.rewind(kv_of(row.sequence), row.base_len - 1)


def _forward(engine: Engine, rows: Sequence[TargetRow], taps: tuple[int, ...]) -> Tensor:
    """Logits. Fills in the states of each row."""
    if not taps:
        return engine.forward([_engine_row(row) for row in rows])
    logits, states = engine.forward_tapped([_engine_row(row, row.num_run) for row in rows], taps)
    for row, its in zip(rows, torch.split(states, [row.num_run for row in rows]), strict=True):
        row.states = its
    return logits


def _engine_row(row: TargetRow, num_tapped: int = 0) -> Row:
    sequence, draft = row.sequence, row.draft
    tokens, count = [*sequence.tokens[row.start : row.start + row.num_tokens], *draft.token_ids], len(draft.token_ids)
    num_logits = num_prompt_rows(row) + (count + 1 if row.decides else 0)
    parents = draft.parents or range(-1, count - 1)
    return Row(kv_of(sequence), tokens, num_logits, parents=parents, num_tapped=num_tapped)


def kv_of(sequence: TargetSequence) -> EngineSequence:
    """The KV of a sequence that is part of a step."""
    if sequence.kv is None:
        raise AssertionError("a planned sequence without a place in the KV cache")
    return sequence.kv


def num_prompt_rows(row: TargetRow) -> int:
    """Rows of logits for tokens of the prompt; they come before those that are verified."""
    if not row.sequence.wants_prompt_logprobs:
        return 0
    return row.num_tokens - row.decides


def take_prompt(rows: Sequence[TargetRow], logits: Tensor) -> Tensor:
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
            token_ids = sequence.spec.prompt[first + 1 : first + 1 + count]
            assert sequence.spec.logprobs is not None
            assert sequence.prompt_report is not None
            # A step that failed is run again: its first results are replaced.
            found = logprobs_of(logits[start : start + count], token_ids, sequence.spec.logprobs.num_top)
            sequence.prompt_report.logprobs[first:] = found
        start += count
        end = start + (len(row.draft) + 1 if row.decides else 0)
        kept.append(logits[start:end])
        start = end
    return torch.cat(kept)
