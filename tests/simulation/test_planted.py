"""The simulation must find each fault that is planted in the shipped code."""

from __future__ import annotations

import pytest

from tests.simulation import draw, run_schedule
from tests.simulation.planted import Planted, planted

SCHEDULES = 200
# Found only after ten and more schedules, the first in the 43rd: few drafts take back what they have just sent.
_RARE = {
    *(Planted.OTHER_EPOCH, Planted.DRAFT_ENDS_SEQUENCE, Planted.STREAM_END_FORGOTTEN),
    *(Planted.CLOSE_FORGOTTEN, Planted.PREFIX_FORGOTTEN),
}
_FAULTS = [
    pytest.param(fault, id=fault.name.lower(), marks=[pytest.mark.slow] if fault in _RARE else []) for fault in Planted
]


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_planted_fault_is_found(fault: Planted) -> None:
    with planted(fault):
        found = any(run_schedule(draw(seed)).violations for seed in range(SCHEDULES))
    assert found, f"not found in {SCHEDULES} schedules: {fault.value}"
