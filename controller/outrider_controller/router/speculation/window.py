"""The acceptance of a request's last verified tokens: an alarm, and a floor where a tenant's policy sets one.

Acceptance alone does not show whether a draft pays: below one half, operators are told, and nothing else changes. Below
a tenant's floor the request decodes plainly, so that is an alarm too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider_controller.router import tuning

SIZE = 200
"""Verified tokens, as the tenant's policy says."""


@dataclass(slots=True)
class Window:
    low: bool = False
    """The window is full, and its acceptance is below one half, or below the tenant's floor where that is higher."""
    _parts: deque[tuple[int, int]] = field(default_factory=deque)
    _verified: int = 0
    _accepted: int = 0

    @property
    def acceptance(self) -> float | None:
        """None until `SIZE` tokens were verified."""
        return self._accepted / self._verified if self._verified >= SIZE else None

    def add(self, verified: int, accepted: int, floor: float | None = None) -> bool:
        """Adds some rounds' tokens. `floor`: the tenant's. Returns whether the acceptance has become low with them."""
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
        self.low = acceptance is not None and acceptance < max(tuning.ALARM, floor or 0.0)
        return self.low and not was
