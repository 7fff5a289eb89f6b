"""Runs planned rows through the model and verifies their drafts.

When a step fails, its halves are run apart until one row is found at fault: only that sequence ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine import DeviceLost, Engine, EngineSequence, OutOfBlocks, Row, Sibling
from outrider.speculation import Candidate, Verdict, VerificationMode, verify
from outrider.target.drafts import Arrival
from outrider.target.logprobs import add_logprobs, asked_rows, num_prompt_rows, take_prompt
from outrider.target.scheduler import PlannedRow
from outrider.target.sequence import TargetSequence


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of one row."""

    row: PlannedRow
    found: Verdict | Exception | None
    """None: a chunk of prefill, which decides nothing."""
    late: bool = False
    """Whether a drafted token that came during the step was verified too, for the position after the others."""
    raised: bool = False
    """Whether the model raised `found` when it ran this row alone, without its draft."""

    @property
    def num_drafted(self) -> int:
        """Drafted tokens that were verified, one that came during the step included."""
        return self.row.num_drafted + self.late

    @property
    def last_arrival(self) -> Arrival | None:
        """Of the last drafted token that was verified; None without one. Only until the sequence commits."""
        return self.row.sequence.drafts.arrivals[self.num_drafted - 1] if self.num_drafted else None

    @property
    def sibling(self) -> int | None:
        """The index of the sibling that the verdict accepts, or None. A sibling has no drafted tokens after it."""
        if not (self.row.siblings and isinstance(self.found, Verdict) and self.found.path):
            return None
        number = self.found.path[-1] - 1 - self.row.num_drafted
        return number if number >= 0 else None


def verify_rows(
    engine: Engine, rows: Sequence[PlannedRow], poll_late_drafts: Callable[[], None] = lambda: None
) -> list[Verified]:
    """One result per row. A row that failed keeps its earlier KV; the others are not affected.

    `poll_late_drafts` is called between the forward and the verification, which may then use late drafts. Raises
    OutOfBlocks, with nothing changed, when the pool cannot hold the rows, and DeviceLost.
    """
    before = [kv_of(row.sequence).cached_len for row in rows]
    try:
        return _run(engine, rows, poll_late_drafts)
    except (OutOfBlocks, DeviceLost):
        raise
    except Exception as error:
        for row, length in zip(rows, before, strict=True):
            engine.kv.retract(kv_of(row.sequence), length)
        if len(rows) == 1:
            if not (rows[0].num_drafted or rows[0].siblings):
                return [Verified(rows[0], error, raised=True)]
            # The draft may be what fails, and it only affects latency: try once more without it.
            rows[0].drop_draft()
            return verify_rows(engine, rows, poll_late_drafts)
        middle = len(rows) // 2
        return verify_rows(engine, rows[:middle], poll_late_drafts) + verify_rows(
            engine, rows[middle:], poll_late_drafts
        )


def _run(engine: Engine, rows: Sequence[PlannedRow], poll_late_drafts: Callable[[], None]) -> list[Verified]:
    logits = engine.forward([_engine_row(row) for row in rows])
    poll_late_drafts()
    deciding = [row for row in rows if row.decides]
    late = [_verifies_one_more(row) for row in deciding]
    logits = take_prompt(rows, logits)
    asked = asked_rows(deciding, logits)
    verdicts = verify(logits, list(map(_candidate, deciding, late))) if deciding else []
    add_logprobs(deciding, asked, verdicts)
    # A request that cannot be served is no fault of the model: nothing is run again.
    found = iter(zip((verdict.error or verdict for verdict in verdicts), late, strict=True))
    return [Verified(row, *next(found)) if row.decides else Verified(row, None) for row in rows]


def _engine_row(row: PlannedRow) -> Row:
    sequence = row.sequence
    start = sequence.cached_len
    tokens = [*sequence.tokens[start : start + row.num_tokens], *sequence.drafts.token_ids[: row.num_drafted]]
    siblings = [Sibling(row.num_tokens - 1 + beside.at, beside.token_id) for beside in row.siblings]
    num_logits = num_prompt_rows(row) + (row.num_drafted + 1 if row.decides else 0)
    return Row(kv_of(row.sequence), tokens, num_logits, siblings)


def _verifies_one_more(row: PlannedRow) -> bool:
    """Whether the buffer has a token after those that were run. Ratio mode only: elsewhere the target's own token
    decides."""
    sequence, count = row.sequence, row.num_drafted
    if sequence.mode is not VerificationMode.RATIO:
        return False
    return count < min(len(sequence.drafts), sequence.speculation.max_draft_tokens)


def _candidate(row: PlannedRow, late: bool) -> Candidate:
    sequence, count = row.sequence, row.num_drafted + late
    beside = row.siblings
    return Candidate(
        params=sequence.opening.params,
        mode=sequence.mode,
        base_len=sequence.committed_len,
        draft=[*sequence.drafts.token_ids[:count], *(one.token_id for one in beside)],
        q=sequence.drafts.q[:count],
        parents=[*range(-1, count - 1), *(one.at - 1 for one in beside)] if beside else (),
        bonus=not late,
        processor=sequence.processor,
    )


def kv_of(sequence: TargetSequence) -> EngineSequence:
    """The KV of a sequence that is part of a step."""
    if sequence.kv is None:
        raise AssertionError("a planned sequence without a place in the KV cache")
    return sequence.kv
