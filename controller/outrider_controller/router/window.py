"""The last drafted tokens of a request that were verified: an alarm, and a floor where a tenant's policy wants one.

Acceptance alone does not say whether a draft pays, so below one half it only takes from the request the credit that
earlier requests gave its draft: time decides then, within a few rounds. Below a tenant's floor the request decodes
plainly, so that is an alarm too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SIZE = 200
ALARM = 0.5


@dataclass(slots=True)
class Window:
    low: bool = False
    """Full, and fewer of its tokens were accepted than half, or than the tenant's floor where that is higher."""
    _parts: deque[tuple[int, int]] = field(default_factory=deque)
    _verified: int = 0
    _accepted: int = 0

    @property
    def acceptance(self) -> float | None:
        """None until enough was verified."""
        return self._accepted / self._verified if self._verified >= SIZE else None

    def add(self, verified: int, accepted: int, floor: float | None = None) -> bool:
        """Some rounds' tokens, and the tenant's floor. True when it has become low with them."""
        if not verified:
            return False
        self._parts.append((verified, accepted))
        self._verified += verified
        self._accepted += accepted
        while self._verified - self._parts[0][0] >= SIZE:
            old_verified, old_accepted = self._parts.popleft()
            self._verified -= old_verified
            self._accepted -= old_accepted
        was, acceptance = self.low, self.acceptance
        self.low = acceptance is not None and acceptance < max(ALARM, floor or 0.0)
        return self.low and not was
