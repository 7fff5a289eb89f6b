"""What a weight may be."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
from outrider.errors import InvalidRequest
from outrider.limits import MAX_TENANT_WEIGHT, check_weight
from outrider.rpc.v1 import tenants_pb2


@pytest.mark.parametrize(
    ("weight", "fits"), [(0.01, True), (100, True), (0.009, False), (101, False), (math.nan, False)]
)
def test_a_weight_is_taken_from_the_least_to_the_greatest_as_a_message_has_them(weight: float, fits: bool) -> None:
    sent = tenants_pb2.Tenant(weight=weight).weight
    with nullcontext() if fits else pytest.raises(InvalidRequest, match="is not from"):
        check_weight("weight", sent, MAX_TENANT_WEIGHT)
