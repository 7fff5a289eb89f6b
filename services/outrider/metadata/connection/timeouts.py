"""Limits on the time of a call to Redis, and counters. Loads no client of Redis."""

from __future__ import annotations

from dataclasses import dataclass

CALL_TIMEOUT_S = 0.05
"""For calls that a request waits for and can continue without."""
BACKGROUND_TIMEOUT_S = 1.0
"""For calls that no request waits for: a slow answer is better than none. Longer than any round trip on Earth."""


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
