"""Which process runs on which CPU cores. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cores:
    """Empty tuples mean: wherever the system puts it."""

    targets: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]
    threads: int
    """Of one worker's engine."""

    def drafts_without(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The drafts' cores that are not among these."""
        return tuple(sorted({core for one in self.drafts for core in one} - set(own)))


def shared(available: Sequence[int], targets: int, drafts: int) -> Cores:
    """No pinning; each worker computes with its share of the cores."""
    threads = max(1, len(available) // max(1, targets + drafts))
    return Cores(((),) * targets, ((),) * drafts, (), threads)


def pinned(available: Sequence[int], targets: int, drafts: int) -> Cores:
    """One core to each worker. What is neither runs on the cores left over, or beside the drafts when none are.

    With fewer cores than workers the targets share the first, and all else shares the others: what a target waits
    for must not stand behind the target's own next step.
    """
    cores = sorted(available)
    if len(cores) < targets + drafts:
        own, others = tuple(cores[:1]), tuple(cores[1:] or cores)
        return Cores((own,) * targets, (others,) * drafts, others, 1)
    own_each = tuple((core,) for core in cores[:targets])
    draft_each = tuple((core,) for core in cores[targets : targets + drafts])
    left = tuple(cores[targets + drafts :])
    of_drafts = tuple(core for one in draft_each for core in one)
    return Cores(own_each, draft_each, left or of_drafts or own_each[-1], 1)
