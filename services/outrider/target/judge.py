"""Runs planned rows through the model and judges their drafts.

A fault is narrowed down by halves until it lies with one row, so that it ends one sequence and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine import Engine, EngineSequence, OutOfBlocks, Row
from outrider.speculation import Candidate, Verdict, verify
from outrider.target.scheduler import PlannedRow
from outrider.target.sequence import TargetSequence

Judgement = Verdict | Exception | None
"""None: a chunk of prefill, which decides nothing."""


def judge(engine: Engine, rows: Sequence[PlannedRow]) -> list[Judgement]:
    """One judgement per row. A row that failed has its KV as it was before; the others are not affected.

    Raises OutOfBlocks, with nothing changed, when the pool cannot hold the rows.
    """
    before = [kv_of(row.sequence).cached_len for row in rows]
    try:
        return _run(engine, rows)
    except OutOfBlocks:
        raise
    except Exception as error:
        for row, length in zip(rows, before, strict=True):
            engine.rewind(kv_of(row.sequence), length)
        if len(rows) == 1:
            return [error]
        middle = len(rows) // 2
        return judge(engine, rows[:middle]) + judge(engine, rows[middle:])


def _run(engine: Engine, rows: Sequence[PlannedRow]) -> list[Judgement]:
    logits = engine.forward([_engine_row(row) for row in rows])
    deciding = [row for row in rows if row.decides]
    verdicts = iter(verify(logits, [_candidate(row) for row in deciding]) if deciding else ())
    return [next(verdicts) if row.decides else None for row in rows]


def _engine_row(row: PlannedRow) -> Row:
    sequence = row.sequence
    start = sequence.cached_len
    tokens = [*sequence.tokens[start : start + row.num_tokens], *sequence.drafts.token_ids[: row.num_drafted]]
    return Row(kv_of(row.sequence), tokens, num_logits=row.num_drafted + 1 if row.decides else 0)


def _candidate(row: PlannedRow) -> Candidate:
    sequence, count = row.sequence, row.num_drafted
    return Candidate(
        params=sequence.opening.params,
        mode=sequence.mode,
        base_len=sequence.committed_len,
        draft=sequence.drafts.token_ids[:count],
        q=sequence.drafts.q[:count],
    )


def kv_of(sequence: TargetSequence) -> EngineSequence:
    """The place of a sequence that is part of a step."""
    if sequence.kv is None:
        raise AssertionError("a planned sequence without a place in the KV cache")
    return sequence.kv
