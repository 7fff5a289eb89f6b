"""What every part of the metadata store has: a connection and keys, limits on the time of a call, and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.metadata.keys import Keys

if TYPE_CHECKING:
    from outrider.metadata.connection.link import RedisLink

from dataclasses import dataclass


class StorePart:
    """Owned by one event loop."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link = link
        self._keys = keys


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
