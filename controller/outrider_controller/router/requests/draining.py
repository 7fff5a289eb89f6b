"""Moves requests off workers that operators drain: off drafts at once, off targets when their hand-over time has come.

A request that no other target could continue stays until it has finished.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider_controller.router.fleet.fleet import Fleet
from outrider_controller.router.fleet.placement import same_weights
from outrider_controller.router.observe.tracing import now_us
from outrider_controller.router.request.failover import Fault
from outrider_controller.router.requests.sequences import ActiveRequest, SequenceTable

LoseTarget = Callable[[ActiveRequest, str, Fault], None]


def hand_over(fleet: Fleet, table: SequenceTable, lose_target: LoseTarget, now_unix_s: float) -> None:
    """Moves the requests that are due now. Each then looks for another worker itself."""
    for worker_id, cordon in fleet.loads.cordons.items():
        if not cordon.hand_over_unix_ms:
            continue
        if (draft := fleet.drafts.get(worker_id)) is not None:
            for sequence_id in tuple(draft.open_sequences):
                release_draft(table, table.by_draft[sequence_id], "draining")
        if (link := fleet.targets.get(worker_id)) is not None and now_unix_s * 1000 >= cordon.hand_over_unix_ms:
            for sequence_id in tuple(link.open_sequences):
                active = table.by_target[sequence_id]
                if _can_move(fleet, active):
                    lose_target(active, "an operator drains it", Fault.LEAVING)


def release_draft(table: SequenceTable, active: ActiveRequest, why: str) -> None:
    """The request leaves its draft and looks for another."""
    table.set_speculation(active, active.speculation.lost())
    if active.draft is not None:
        active.recorder.lost(active.draft.worker.info, why, now_us())
    table.release_draft(active)
    active.events.wake()


def _can_move(fleet: Fleet, active: ActiveRequest) -> bool:
    others = fleet.live_targets(active.request.model)
    return any(same_weights(other.info.model_revision, active.failover.revision) for other in others)
