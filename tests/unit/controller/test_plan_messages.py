"""What a tenant's record says of its speculation."""

from __future__ import annotations

import pytest
from outrider.rpc.v1 import tenants_pb2 as tenants
from outrider_controller.plan_messages import speculation_of


@pytest.mark.parametrize(("weight", "worth"), [(0.0, 1.0), (0.1, 0.5), (1.5, 1.5), (100.0, 2.0)])
def test_a_saved_token_is_worth_as_much_as_its_tenants_weight_within_bounds(weight: float, worth: float) -> None:
    tenant = tenants.Tenant(name="acme", weight=weight, speculation=tenants.SpeculationPolicy(max_draft_tokens=3))
    said = speculation_of(tenant)
    assert said is not None
    assert (said.weight, said.max_draft_tokens) == (worth, 3)


def test_what_is_said_of_its_speculation_counts_for_more_than_its_weight() -> None:
    said = speculation_of(tenants.Tenant(name="acme", weight=2, speculation=tenants.SpeculationPolicy(weight=0.25)))
    assert said is not None
    assert said.weight == 0.25


def test_of_whom_nothing_is_said_is_as_everybody() -> None:
    assert speculation_of(tenants.Tenant(name="acme")) is None
