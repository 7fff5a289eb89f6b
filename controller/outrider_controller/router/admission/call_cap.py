"""How many calls one router takes, waiting ones included, and from which tenants. Pure: the clock is an argument.

While less than `BUSY` of them are taken, every call is let in. Above that, only calls of tenants below their weighted
share are.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider_controller.router import tuning


@dataclass(slots=True)
class _Calls:
    weight: float
    number: int = 0


class CallCap:
    def __init__(self, most: int) -> None:
        self.num_calls = 0
        self._most = most
        self._tenants: dict[str, _Calls] = {}
        """Tenants with open calls."""
        self._weights = 0.0
        """Sum over these tenants."""
        self._mean_s = 0.0
        """Mean duration of a call; 0 before the first has ended."""

    def enter(self, tenant: str, weight: float) -> None:
        """Counts a new call. It has to `leave`, refused or not."""
        self.num_calls += 1
        calls = self._tenants.setdefault(tenant, _Calls(0.0))
        self._weights += weight - calls.weight
        calls.weight = weight
        calls.number += 1

    def takes(self, tenant: str, begun: bool = False) -> bool:
        """Whether the newest call of this tenant, which has entered, may stay. `begun`: another router had taken it."""
        if self.num_calls > self._most:
            return False
        calls = self._tenants[tenant]
        has_room = self.num_calls <= tuning.BUSY * self._most
        return begun or has_room or calls.number <= self._most * calls.weight / self._weights

    def wait_s(self, tenant: str) -> float | None:
        """Seconds until there may be a place for a refused call; None while no call has ended."""
        if not self._mean_s:
            return None
        # At the cap any call that ends makes room; below it, only one of the same tenant.
        ending = self.num_calls if self.num_calls > self._most else self._tenants[tenant].number
        return self._mean_s / max(1, ending - 1)

    def leave(self, tenant: str, lasted_s: float | None) -> None:
        """`lasted_s`: duration of a call that was taken; None for a refused one."""
        if lasted_s is not None:
            self._mean_s += (tuning.NEWEST if self._mean_s else 1.0) * (lasted_s - self._mean_s)
        self.num_calls -= 1
        calls = self._tenants[tenant]
        calls.number -= 1
        if not calls.number:
            del self._tenants[tenant]
            # The floating-point sum drifts.
            self._weights = self._weights - calls.weight if self._tenants else 0.0
