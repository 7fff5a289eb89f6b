"""What an opening and a draft may say."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
from outrider.errors import InvalidRequest
from outrider.protocol.limits import (
    MAX_DRAFT_BYTES,
    MAX_SALT_BYTES,
    MAX_SOURCE_BYTES,
    MAX_STOP_TOKENS,
    MAX_TENANT_WEIGHT,
)
from outrider.protocol.validate import DraftValidator, check_draft, check_opening, check_weight
from outrider.rpc.v1 import sequence_pb2 as sequence
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


SAMPLING = sequence.Sampling(temperature=0.5, top_p=0.9, seed=3)


RATIO = sequence.VERIFICATION_MODE_RATIO
GREEDY = sequence.VERIFICATION_MODE_GREEDY


def validator(mode: sequence.VerificationMode.ValueType) -> DraftValidator:
    return DraftValidator(mode, SAMPLING, prompt_len=3, vocab_size=100, max_context_len=60, max_draft_tokens=3, epoch=2)


def drafted(**fields: object) -> sequence.Draft:
    return sequence.Draft(**{"epoch": 2, "base_len": 5, "token_ids": [7, 8], **fields})


def q(*pairs: tuple[int, int]) -> sequence.DraftDistribution:
    return sequence.DraftDistribution(token_ids=[t for t, _ in pairs], counts=[n for _, n in pairs])


SURE = [q((7, 65536)), q((8, 65535), (9, 1))]


@pytest.mark.parametrize(
    ("draft", "to"),
    [
        (drafted(), GREEDY),
        (drafted(token_ids=[]), GREEDY),
        (drafted(epoch=9, base_len=4), GREEDY),
        (drafted(parents=[-1, -1], confidence=[0.5, 1]), GREEDY),
        (drafted(q=SURE, sampling=SAMPLING), RATIO),
        (drafted(token_ids=[]), RATIO),
    ],
    ids=str,
)
def test_honest_drafts_pass_even_when_late_or_empty(draft: Any, to: Any) -> None:
    validator(to).check(draft)


def test_a_tree_may_have_more_tokens_than_a_chain_but_not_more_positions() -> None:
    tree = drafted(token_ids=[7, 8, 9, 10, 11], parents=[-1, 0, -1, 2, 3])
    assert validator(GREEDY).check(tree) == 3
    assert validator(GREEDY).check(drafted()) == 2


@pytest.mark.parametrize(
    ("field", "draft", "to"),
    [
        ("epoch", drafted(epoch=1), GREEDY),
        ("token_ids", drafted(token_ids=[1, 2, 3, 4]), GREEDY),
        ("token_ids", drafted(token_ids=[100]), GREEDY),
        ("base_len", drafted(base_len=2), GREEDY),
        ("base_len", drafted(base_len=61), GREEDY),
        ("parents", drafted(parents=[-1]), GREEDY),
        ("parents", drafted(parents=[-1, 1]), GREEDY),
        ("parents", drafted(parents=[-2, 0]), GREEDY),
        ("token_ids", drafted(token_ids=[7] * 4, parents=[-1, 0, 1, 2]), GREEDY),
        ("token_ids", drafted(token_ids=[7] * 257, parents=[-1] * 257), GREEDY),
        ("parents", drafted(parents=[-1, 0], q=SURE, sampling=SAMPLING), RATIO),
        ("source", drafted(source="n" * (MAX_SOURCE_BYTES + 1)), GREEDY),
        ("source", drafted(source="é" * (MAX_SOURCE_BYTES // 2 + 1)), GREEDY),
        ("confidence", drafted(confidence=[0.5]), GREEDY),
        ("confidence", drafted(confidence=[0.5, float("nan")]), GREEDY),
        ("confidence", drafted(confidence=[0.5, -1]), GREEDY),
        ("q", drafted(q=SURE), GREEDY),
        ("q", drafted(sampling=SAMPLING), RATIO),
        ("q", drafted(q=SURE[:1], sampling=SAMPLING), RATIO),
        ("sampling", drafted(q=SURE), RATIO),
        ("sampling", drafted(q=SURE, sampling=sequence.Sampling(temperature=0.6, top_p=0.9, seed=3)), RATIO),
        ("q", drafted(q=[SURE[0], q((8, 65535))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q((8, 65536), (9, 0))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q((8, 1), (8, 65535))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q((9, 65536))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q((8, 65535), (100, 1))], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], sequence.DraftDistribution()], sampling=SAMPLING), RATIO),
        ("q", drafted(q=[SURE[0], q(*((i, 1024) for i in range(64)), (65, 0))], sampling=SAMPLING), RATIO),
    ],
    ids=str,
)
def test_a_draft_no_correct_worker_would_send_is_refused_by_field(field: str, draft: Any, to: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}\b"):
        validator(to).check(draft)


def test_what_this_version_does_not_know_counts_as_bytes_too() -> None:
    # Field 4095, of bytes, of a length of 131,072.
    unknown = b"\xfa\xff\x01" + b"\x80\x80\x08" + bytes(131_072)
    assert len(unknown) > MAX_DRAFT_BYTES
    draft = sequence.Draft.FromString(drafted().SerializeToString() + unknown)
    with pytest.raises(InvalidRequest, match=r"^draft\b"):
        check_draft(draft, 100, 60, 3)


def test_a_draft_may_still_use_the_limit_it_had_before() -> None:
    now = validator(GREEDY)
    now.allow(1)
    assert now.check(drafted(token_ids=[1, 2, 3])) == 3
    now.allow(4)
    assert now.check(drafted(token_ids=[1, 2, 3, 4])) == 4


def test_a_refused_draft_does_not_raise_the_epoch() -> None:
    now = validator(GREEDY)
    with pytest.raises(InvalidRequest):
        now.check(drafted(epoch=5, token_ids=[100]))
    assert now.check(drafted(epoch=2)) == 2


@pytest.mark.parametrize(
    ("weight", "fits"), [(0.01, True), (100, True), (0.009, False), (101, False), (math.nan, False)]
)
def test_a_weight_is_taken_from_the_least_to_the_greatest_as_a_message_has_them(weight: float, fits: bool) -> None:
    sent = tenants_pb2.Tenant(weight=weight).weight
    with nullcontext() if fits else pytest.raises(InvalidRequest, match="is not from"):
        check_weight("weight", sent, MAX_TENANT_WEIGHT)
