"""Where one sequence's time goes between two of its commits, and what it takes of the worker's. Seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """Queue, prefill and the deciding step follow one another; together they are all the time between two commits."""

    queue_s: float = 0.0
    """It stood ready for a step."""
    wait_s: float = 0.0
    """Of that, it was held back for a draft."""
    prefill_s: float = 0.0
    """Steps that ran a part of its prompt and decided nothing."""
    draft_queue_s: float = 0.0
    """Arrival of the last draft judged to the start of the step."""
    share_s: float = 0.0
    """Of its steps: its part of their time."""
    wasted_s: float = 0.0
    """Of that, rows of drafted tokens that were not accepted."""
    num_wasted_rows: int = 0
