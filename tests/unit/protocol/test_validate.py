"""What an opening and a draft may say."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
from outrider.errors import InvalidRequest
from outrider.protocol.limits import (
    MAX_SALT_BYTES,
    MAX_STOP_TOKENS,
    MAX_TENANT_WEIGHT,
)
from outrider.protocol.validate import check_opening, check_weight
from outrider.rpc.v1 import tenants_pb2
from outrider.speculation import SamplingParams, VerificationMode

OPENING: dict[str, Any] = {
    "prompt": [1, 2, 3],
    "committed": [4],
    "max_new_tokens": 5,
    "stop_token_ids": [2],
    "params": SamplingParams(temperature=0),
    "mode": VerificationMode.GREEDY,
    "salt": b"tenant",
    "vocab_size": 100,
    "max_context_len": 60,
}


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("prompt_token_ids", {"prompt": []}),
        ("prompt_token_ids[1]", {"prompt": [99, 100]}),
        ("prompt_token_ids[0]", {"prompt": [-1]}),
        ("prompt_token_ids", {"prompt": [1] * 60}),
        ("committed_token_ids[0]", {"committed": [4_000_000_000]}),
        ("committed_token_ids", {"committed": [1] * 5}),
        ("committed_token_ids", {"prompt": [1] * 59}),
        ("stopping.max_new_tokens", {"max_new_tokens": 0, "committed": []}),
        ("stopping.stop_token_ids[0]", {"stop_token_ids": [100]}),
        ("stopping.stop_token_ids", {"stop_token_ids": [1] * (MAX_STOP_TOKENS + 1)}),
        ("mode", {"mode": VerificationMode.COUPLED}),
        ("cache_salt", {"salt": b"x" * (MAX_SALT_BYTES + 1)}),
    ],
)
def test_an_opening_is_refused_by_the_name_of_its_field(field: str, changed: dict[str, Any]) -> None:
    check_opening(**OPENING)
    with pytest.raises(InvalidRequest) as caught:
        check_opening(**OPENING | changed)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("weight", "fits"), [(0.01, True), (100, True), (0.009, False), (101, False), (math.nan, False)]
)
def test_a_weight_is_taken_from_the_least_to_the_greatest_as_a_message_has_them(weight: float, fits: bool) -> None:
    sent = tenants_pb2.Tenant(weight=weight).weight
    with nullcontext() if fits else pytest.raises(InvalidRequest, match="is not from"):
        check_weight("weight", sent, MAX_TENANT_WEIGHT)
