"""`outrider up` under load: what was decided outlives the control plane and what Redis held."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.decisions import LOSSES, measure
from tests.soak.kill_pairs import running_stack

pytestmark = pytest.mark.timeout(600)


async def test_the_same_is_decided_after_redis_was_emptied_and_the_control_plane_killed(
    tiny: Path, tmp_path: Path
) -> None:
    lost = tuple(loss for loss in LOSSES if loss.what.startswith(("Redis", "control plane again")))
    assert len(lost) == 2
    async with running_stack(str(tiny), tmp_path / "stack", tmp_path / "cache") as up:
        took, outcomes = await measure(up, streams=4, max_tokens=64, trials=2, losses=lost)
    # How soon, a busy machine cannot say.
    assert len(took) == 2
    assert [(one.lost, one.failed, one.same_s < 60) for one in outcomes] == [(loss.what, 0, True) for loss in lost]
