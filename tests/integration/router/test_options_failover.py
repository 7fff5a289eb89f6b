"""Every option of a request: one text with speculation, without, and when the target fails in mid-answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence

from tests.integration.router.test_real_workers import SAMPLINGS

NUM_PROMPTS = 20
NUM_TOKENS = 40
EOS = 2
GRAMMAR = r"start: /[a-z]{3,9}( [a-z]{3,9}){9,30}/"
OPTIONS: dict[str, Any] = {
    "penalties": {
        "logits": sequence.LogitsOptions(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.3)
    },
    "bias": {
        "logits": sequence.LogitsOptions(repetition_penalty=1, bias_token_ids=[40, 41, 90], biases=[6.0, -50.0, 4.0])
    },
    "mask": {"logits": sequence.LogitsOptions(repetition_penalty=1, allowed_token_ids=list(range(60, 90)))},
    "words": {
        "logits": sequence.LogitsOptions(
            repetition_penalty=1, min_tokens=20, bad_words=[sequence.TokenRun(token_ids=[token]) for token in (40, 41)]
        )
    },
    "grammar": {"logits": sequence.LogitsOptions(repetition_penalty=1, grammar=GRAMMAR)},
    "logprobs": {"logprobs": sequence.LogprobsOptions(num_top=3)},
    "prediction": {"predicted_token_ids": [40, 41, 42, 43] * 10},
}


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 259) for _ in range(rng.randint(2, 24))] for _ in range(NUM_PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("option", OPTIONS)
async def test_the_text_is_the_same_on_off_and_after_a_failover(real_fleet: Any, option: str, sampling: str) -> None:
    if option == "grammar":
        pytest.importorskip("llguidance")
    fields = SAMPLINGS[sampling] | OPTIONS[option]
    moved = 0
    for prompt in prompts():
        found = []
        for mode in (router.SPECULATION_MODE_OFF, router.SPECULATION_MODE_ON, router.SPECULATION_MODE_ON):
            request = real_fleet.request(prompt, NUM_TOKENS, model="tiny", speculation=mode, **fields)
            request.stopping.stop_token_ids[:] = [EOS]
            found.append(await _answered(real_fleet, request, fails=len(found) == 2))
        (plain, _), (drafted, _), (taken_over, failovers) = found
        assert drafted == plain
        assert taken_over == plain
        moved += failovers
    assert moved >= NUM_PROMPTS // 2, "most answers were longer than what was said before the failure"


async def _answered(fleet: Any, request: router.RouteRequest, *, fails: bool) -> tuple[list[Any], int]:
    """Tokens, with what is told of each; and how often the request moved."""
    said: list[Any] = []
    failovers = 0
    async for response in fleet.call(request):
        said += (
            zip(response.token_ids, map(_rounded, response.logprobs), strict=False)
            if response.logprobs
            else (response.token_ids)
        )
        failovers = response.metrics.num_target_failovers
        if fails and len(said) >= 5:
            fails = False
            for target in fleet.targets:
                target.expire_drain()
    return said, failovers


def _rounded(found: sequence.TokenLogprobs) -> tuple[Any, ...]:
    return round(found.logprob, 3), tuple(found.top_token_ids)
