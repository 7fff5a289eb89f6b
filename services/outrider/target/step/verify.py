"""Runs planned rows through the model and verifies their drafts.

When a step fails, its halves are run apart until one row is found at fault: only that sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine import DeviceLost, Engine, EngineSequence, OutOfBlocks, Row
from outrider.speculation import Candidate, MaskLate, Verdict, verify
from outrider.speculation.logprobs import logprobs_of
from outrider.target.step.scheduler import PlannedRow
from outrider.target.step.sequence import TargetSequence


@dataclass(slots=True)
class Verified:
    """What came of one row."""

    row: PlannedRow
    found: Verdict | Exception | None
    """None: a chunk of prefill, which decides nothing, or a row whose mask was not ready."""
    raised: bool = False
    """Whether the model raised `found` when it ran this row alone, without its draft."""
    states: Tensor | None = None
    """[tokens of the row, layers · width]: the hidden states that were asked for."""

    def committed_states(self, num_accepted: int) -> Tensor:
        """Of the tokens that were committed before the step, and of the accepted ones."""
        assert self.states is not None
        nodes = [self.row.num_tokens + node for node in self.path[:num_accepted]]
        return self.states[[*range(self.row.num_tokens), *nodes]]

    @property
    def path(self) -> Sequence[int]:
        """The nodes of the row's draft that verification accepts."""
        if not isinstance(self.found, Verdict):
            return []
        return [row - 1 for row in self.found.path] if self.row.draft.parents else range(self.found.num_accepted)


def verify_rows(engine: Engine, rows: Sequence[PlannedRow], taps: tuple[int, ...] = ()) -> list[Verified]:
    """One result per row. A row that failed keeps its earlier KV; the others are not affected. taps: the layers whose
    states are wanted too, as Engine.forward_tapped has them.

    Raises OutOfBlocks, with nothing changed, when the pool cannot hold the rows, and DeviceLost.
    """
    try:
        return _run(engine, rows, taps)
    except (OutOfBlocks, DeviceLost):
        raise
    except Exception as error:
        for row in rows:
            engine.kv.retract(kv_of(row.sequence), row.start)
        if len(rows) == 1:
            if not rows[0].draft.token_ids:
                return [Verified(rows[0], error, raised=True)]
            # The draft may be what fails, and it only affects latency: try once more without it.
            rows[0].drop_draft()
            return verify_rows(engine, rows, taps)
        middle = len(rows) // 2
        return verify_rows(engine, rows[:middle], taps) + verify_rows(engine, rows[middle:], taps)


def _run(engine: Engine, rows: Sequence[PlannedRow], taps: tuple[int, ...]) -> list[Verified]:
    logits, states = _forward(engine, rows, taps)
    deciding = [row for row in rows if row.decides]
    logits = take_prompt(rows, logits)
    verdicts = verify(logits, list(map(_candidate, deciding))) if deciding else []
    found = iter([_result(engine, row, verdict) for row, verdict in zip(deciding, verdicts, strict=True)])
    return [
        Verified(row, next(found) if row.decides else None, states=its) for row, its in zip(rows, states, strict=True)
    ]


def _forward(
    engine: Engine, rows: Sequence[PlannedRow], taps: tuple[int, ...]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Logits, and the states of each row."""
    if not taps:
        return engine.forward([_engine_row(row) for row in rows]), [None] * len(rows)
    tapped = [replace(_engine_row(row), num_tapped=row.num_run) for row in rows]
    logits, states = engine.forward_tapped(tapped, taps)
    return logits, torch.split(states, [row.num_run for row in rows])


def _result(engine: Engine, row: PlannedRow, verdict: Verdict) -> Verdict | Exception | None:
    if isinstance(verdict.error, MaskLate):
        # The same row comes again in a later step.
        engine.kv.rewind(kv_of(row.sequence), row.sequence.committed_len - 1)
        return None
    # A request that cannot be served is no fault of the model: nothing is run again.
    return verdict.error or verdict


def _engine_row(row: PlannedRow) -> Row:
    sequence, draft = row.sequence, row.draft
    tokens, count = [*sequence.tokens[row.start : row.start + row.num_tokens], *draft.token_ids], len(draft.token_ids)
    num_logits = num_prompt_rows(row) + (count + 1 if row.decides else 0)
    return Row(kv_of(sequence), tokens, num_logits, parents=draft.parents or range(-1, count - 1))


def _candidate(row: PlannedRow) -> Candidate:
    sequence = row.sequence
    return Candidate(
        params=sequence.opening.params,
        mode=sequence.mode,
        draft=row.draft,
        processor=sequence.processor,
        num_top=sequence.opening.num_top,
    )


def kv_of(sequence: TargetSequence) -> EngineSequence:
    """The KV of a sequence that is part of a step."""
    if sequence.kv is None:
        raise AssertionError("a planned sequence without a place in the KV cache")
    return sequence.kv


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
