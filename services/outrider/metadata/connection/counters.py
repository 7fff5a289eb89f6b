"""Counts of errors, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreCounters:
    num_outages: int = 0
    num_timeouts: int = 0
    num_refused: int = 0
    """Commands that the server answered with an error."""
    num_malformed: int = 0
    """Records, ids and events that could not be parsed and were skipped."""
    num_dropped_events: int = 0
    """Events emitted while the store was unreachable."""
