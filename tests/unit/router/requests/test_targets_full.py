"""A request that has left the queue, and finds every target full: it waits for room as long as it may wait."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from outrider.errors import OutriderError, Overloaded
from outrider_controller.router.request.failover import FailoverState
from outrider_controller.router.requests.assignment import Assigner


@pytest.mark.parametrize(
    ("waits_s", "told"),
    [(0.02, "every target of 'm' is full"), (0.2, "every target of 'm' is full"), (math.inf, "no target of 'm' is up")],
)
async def test_it_is_told_that_they_are_full_and_one_with_tokens_ends_too(waits_s: float, told: str) -> None:
    """Whether it may wait for less or for more time than for a target that has to come, or has committed tokens."""

    async def nothing(*asked: Any) -> None: ...

    picker = SimpleNamespace(target=nothing, has_full_target=lambda model: True, revisions_like=lambda *_: [None])
    config = SimpleNamespace(failover=SimpleNamespace(wait_for_target_s=1.0))
    changed, never_s = asyncio.Event(), -math.inf
    no = lambda model: False  # noqa: E731
    fleet = SimpleNamespace(changed=lambda: changed, back_until_s=lambda model: never_s, cordoned=no, cut_off=no)
    admission = SimpleNamespace(retry_after_s=lambda request: 7.0)
    assigner = Assigner(*cast(Any, (fleet, picker, None, None, admission, config, None)))
    request, began_s = cast(Any, SimpleNamespace(model="m")), asyncio.get_running_loop().time()
    with pytest.raises(OutriderError, match=told) as refused:
        state = FailoverState(cast(Any, None), "")
        await assigner._find_target(request, None, 0.05, state, room_until_s=began_s + waits_s)
    assert isinstance(refused.value, Overloaded) == math.isfinite(waits_s)
    assert asyncio.get_running_loop().time() - began_s >= min(waits_s, 0.05)
