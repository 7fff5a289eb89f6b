"""Which drafts a target may connect to: those that hold a lease, at the leased address only, whatever a message names.

While the leases cannot be read, the last ones read count. Without a metadata store there are none.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.metadata import LeaseRecord

ReadLeases = Callable[[], "Awaitable[Iterable[LeaseRecord]]"]
"""Reads the leases of drafts. Returns the last known ones when the store is unreachable, and does not raise."""

# As long as a lease lasts.
_FRESH_S = 5.0


async def no_leases() -> Iterable[LeaseRecord]:
    return ()


@dataclass(slots=True)
class DraftLeases:
    read: ReadLeases
    clock: Callable[[], float]
    """Monotonic seconds."""
    _records: dict[str, LeaseRecord] = field(default_factory=dict)
    _read_s: float = -math.inf

    def hold(self, worker_id: str, address: str) -> bool:
        """Whether the worker is known to hold a lease at this address. False when the last reading is too old."""
        found = self.find(worker_id)
        return self.clock() - self._read_s < _FRESH_S and found is not None and found.address == address

    def find(self, worker_id: str) -> LeaseRecord | None:
        """As it was read last."""
        return self._records.get(worker_id)

    async def look(self) -> None:
        self._records = {record.info.worker_id: record for record in await self.read()}
        self._read_s = self.clock()
