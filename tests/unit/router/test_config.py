"""Impossible configurations fail at birth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from outrider.gateway.config import Failover
from outrider.limits import MAX_WAIT_US
from outrider_controller.router.config import AdmissionConfig, FailoverConfig, PolicyConfig, RouterConfig

# Of a router with Ray, on a busy machine.
START_S = 12


def test_requests_wait_longer_for_a_lone_router_than_it_drains_and_starts() -> None:
    assert RouterConfig().drain_timeout_s + START_S < Failover().window_s


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: PolicyConfig(max_draft_tokens=-1), "max_draft_tokens"),
        (lambda: PolicyConfig(max_draft_tokens=65), "max_draft_tokens"),
        (lambda: PolicyConfig(max_wait_us=-1), "max_wait_us"),
        (lambda: PolicyConfig(max_wait_us=MAX_WAIT_US + 1), "max_wait_us"),
        (lambda: FailoverConfig(wait_for_target_s=0), "wait_for_target_s"),
        (lambda: FailoverConfig(wait_for_restart_s=float("nan")), "wait_for_restart_s"),
        (lambda: AdmissionConfig(max_sessions=0), "max_sessions"),
        (lambda: RouterConfig(refresh_s=-1), "refresh_s"),
    ],
)
def test_the_field_at_fault_is_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()
