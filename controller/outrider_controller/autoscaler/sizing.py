"""How many draft workers and routers the load needs, from how busy the present ones were. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider_controller.autoscaler import tuning


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The workers of one kind, over the last minute."""

    workers: int
    busy: float
    """Mean share of time in which they worked, 0 to 1."""
    late: float = 0.0
    """Drafts only: share of rounds for which they were too late."""


@dataclass(frozen=True, slots=True)
class Wanted:
    workers: int
    fewer_since_s: float | None = None
    most_since: int = 0
    """Most that were needed at any time since then."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The numbers wanted for the whole fleet."""

    drafts: Mapping[str, Wanted] = field(default_factory=dict)
    """By draft version."""
    routers: Wanted = Wanted(1)


def sizing(drafts: Mapping[str, Utilisation], routers: Utilisation, last: Sizing, now_s: float) -> Sizing:
    return Sizing(
        {version: _wanted(_needed(seen), seen, last.drafts.get(version), now_s) for version, seen in drafts.items()},
        _wanted(_needed(routers), routers, last.routers, now_s),
    )


def _needed(seen: Utilisation) -> int:
    # Rounded, or a floating-point error would add a worker to a fleet exactly at its aim.
    needed = math.ceil(round(seen.workers * seen.busy / tuning.WORKER_BUSY, 6))
    if seen.late > 1 - tuning.WORKER_BUSY:
        needed = max(needed, seen.workers + 1)
    return max(1, needed)


def _wanted(needed: int, seen: Utilisation, last: Wanted | None, now_s: float) -> Wanted:
    if last is None:
        return Wanted(max(needed, seen.workers))
    if needed >= last.workers:
        return Wanted(needed)
    since_s = now_s if last.fewer_since_s is None else last.fewer_since_s
    most = max(needed, last.most_since)
    return Wanted(last.workers, since_s, most) if now_s - since_s < tuning.LONG_S else Wanted(most)
