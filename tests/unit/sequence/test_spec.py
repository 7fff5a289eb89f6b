"""What every door refuses of a sequence, and that a message says all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from outrider.errors import InvalidRequest
from outrider.limits import MAX_LABEL_CHARS, MAX_SALT_BYTES, MAX_STOP_TOKENS
from outrider.options.logits import LogitsOptions
from outrider.options.logprobs import LogprobsOptions
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.protocol.convert import mode_from_proto
from outrider.protocol.sequences import opening_for_draft, opening_for_target, spec_from_proto
from outrider.rpc.v1 import sequence_pb2
from outrider.sequence.spec import SampleConsent, SequenceSpec
from outrider.sequence.speculation import Speculation

SPEC = SequenceSpec(
    prompt=(1, 2, 3),
    params=SamplingParams(temperature=0.5, top_k=7, top_p=0.5, min_p=0.25, seed=9),
    mode=VerificationMode.COUPLED,
    max_new_tokens=5,
    stop_token_ids=frozenset({2, 4}),
    committed=(4,),
    salt=b"tenant",
    logits=LogitsOptions(logit_bias=((7, 0.5),), min_tokens=2, grammar="start: /a/"),
    logprobs=LogprobsOptions(3, True),
    prediction=(5, 6),
    request_id="r",
    tenant="t",
    samples=SampleConsent.TEXT,
    consent_unix_us=77,
)


def read(message: sequence_pb2.OpenSequence) -> SequenceSpec:
    committed, mode = tuple(message.committed_token_ids), mode_from_proto(message.mode)
    return spec_from_proto(SequenceSpec, message, committed=committed, mode=mode, salt=message.cache_salt)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("prompt_token_ids", {"prompt": ()}),
        ("prompt_token_ids[1]", {"prompt": (99, 100)}),
        ("prompt_token_ids[0]", {"prompt": (-1,)}),
        ("prompt_token_ids", {"prompt": (1,) * 60}),
        ("committed_token_ids[0]", {"committed": (4_000_000_000,)}),
        ("committed_token_ids", {"committed": (1,) * 5}),
        ("committed_token_ids", {"prompt": (1,) * 59}),
        ("stopping.max_new_tokens", {"max_new_tokens": 0, "committed": ()}),
        ("stopping.stop_token_ids[0]", {"stop_token_ids": frozenset({100})}),
        ("mode", {"mode": VerificationMode.GREEDY}),
        ("mode", {"params": SamplingParams(temperature=0)}),
        ("cache_salt", {"salt": b"x" * (MAX_SALT_BYTES + 1)}),
        ("predicted_token_ids", {"prediction": (1,) * 61}),
        ("predicted_token_ids[1]", {"prediction": (1, 100)}),
        ("request_id", {"request_id": "r" * (MAX_LABEL_CHARS + 1)}),
        ("tenant", {"tenant": "a tenant"}),
        ("logits.allowed_token_ids", {"logits": LogitsOptions(allowed_token_ids=(100,))}),
    ],
)
def test_a_sequence_is_refused_by_the_name_of_its_field(field: str, changed: dict[str, Any]) -> None:
    SPEC.check(100, 60)
    with pytest.raises(InvalidRequest) as caught:
        replace(SPEC, **changed).check(100, 60)
    assert caught.value.field == field


def test_one_that_needs_no_more_room_may_be_complete() -> None:
    complete = replace(SPEC, committed=(5,) * 5)
    complete.check(100, 8, room=0)
    with pytest.raises(InvalidRequest):
        complete.check(100, 7, room=0)


def test_a_message_to_a_target_says_all_of_it_and_one_to_a_draft_worker_what_drafts_need() -> None:
    speculation = Speculation(3)
    assert read(opening_for_target(SPEC, 8, SPEC.committed, speculation, None)) == SPEC
    drafts = replace(
        SPEC, logits=None, logprobs=None, prediction=(), samples=SampleConsent.OFF, consent_unix_us=0, committed=(4, 5)
    )
    assert read(opening_for_draft(SPEC, 8, (4, 5), speculation)) == drafts


def test_a_message_with_more_stop_tokens_than_there_may_be_is_refused_even_if_they_are_one() -> None:
    message = opening_for_draft(SPEC, 8, (), Speculation())
    message.stopping.stop_token_ids[:] = [2] * (MAX_STOP_TOKENS + 1)
    with pytest.raises(InvalidRequest) as caught:
        read(message)
    assert caught.value.field == "stopping.stop_token_ids"
