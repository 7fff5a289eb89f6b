"""Where one sequence's time goes between two of its commits, and its share of the worker's time. In seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """Queue, prefill and the deciding step follow one another; together they are all the time between two commits."""

    queue_s: float = 0.0
    """Time in which it was ready for a step."""
    wait_s: float = 0.0
    """The part of that in which it was held back for a draft."""
    prefill_s: float = 0.0
    """Steps that ran a chunk of its prompt and committed nothing."""
    draft_queue_s: float = 0.0
    """From the arrival of the last verified draft to the start of the step."""
    share_s: float = 0.0
    """Its share of the time of its steps."""
    wasted_s: float = 0.0
    """The part of that spent on drafted tokens that were not accepted."""
    num_wasted_rows: int = 0
