"""How many draft workers and routers are wanted, from how busy the ones there are have been. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Busy drafts answer late, and late drafts are worth nothing; a busy router is late for everybody.
_DRAFT_BUSY, _ROUTER_BUSY = 0.7, 0.6
# More are wanted at once; fewer only after so long, for it takes minutes to start a worker.
SHRINK_AFTER_S = 300.0
# Drafted rounds that came too late: with more than that, drafts are short whatever they say of their time.
_LATE = 0.2


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The workers of one kind, over the last minute."""

    workers: int
    busy: float
    """Mean share of their time in which they worked."""
    late: float = 0.0
    """Drafts only: share of rounds for which they came too late."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of one kind."""

    workers: int
    fewer_since_s: float | None = None
    """Since when fewer would do."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What the fleet should have."""

    drafts: Mapping[str, Wanted] = field(default_factory=dict)
    """By draft version."""
    routers: Wanted = Wanted(1)


def sizing(drafts: Mapping[str, Utilisation], routers: Utilisation, last: Sizing, now_s: float) -> Sizing:
    return Sizing(
        {
            version: _wanted(_needed(seen, _DRAFT_BUSY), seen, last.drafts.get(version), now_s)
            for version, seen in drafts.items()
        },
        _wanted(_needed(routers, _ROUTER_BUSY), routers, last.routers, now_s),
    )


def _needed(seen: Utilisation, most_busy: float) -> int:
    # Rounded, or a fleet at exactly its aim would want one more by the last bit of a product.
    needed = math.ceil(round(seen.workers * seen.busy / most_busy, 6))
    if seen.late > _LATE:
        needed = max(needed, seen.workers + 1)
    return max(1, needed)


def _wanted(needed: int, seen: Utilisation, last: Wanted | None, now_s: float) -> Wanted:
    if last is None:
        return Wanted(max(needed, seen.workers))
    if needed >= last.workers:
        return Wanted(needed)
    since_s = now_s if last.fewer_since_s is None else last.fewer_since_s
    return Wanted(last.workers, since_s) if now_s - since_s < SHRINK_AFTER_S else Wanted(needed)
