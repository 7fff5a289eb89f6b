"""Every option of a request: one text with speculation, without, and when the target fails in mid-answer."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tools.structured import Structured
from outrider.gateway.tools.tool_grammar import FreeCalls
from outrider.gateway.tools.tools import ToolUse
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.target.grammars.tokenizer import read_tokenizer

from tests.integration.router.test_real_workers import SAMPLINGS

NUM_PROMPTS = 20
NUM_TOKENS = 40
EOS = 2
NUM_ANSWERS = 3
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 12}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
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
    # No byte twice in a row.
    "phrases": {
        "logits": sequence.LogitsOptions(
            repetition_penalty=1,
            bad_words=[sequence.TokenRun(token_ids=[token, token]) for token in range(3, 200)],
        )
    },
    "logprobs": {"logprobs": sequence.LogprobsOptions(num_top=3)},
    "prediction": {"predicted_token_ids": [40, 41, 42, 43] * 10},
}


GRAMMARS = ("grammar", "schema", "calls", "strict")


def grammar(name: str, tiny: Path) -> str:
    """As a gateway makes it of a Lark grammar, a JSON schema, a required call, and of strict functions beside text."""
    tokenizer = ModelTokenizer.parse(read_tokenizer(tiny))
    match name:
        case "schema":
            return Structured("json_schema", SCHEMA, "x").to_grammar(tokenizer)
        case "calls":
            required = ToolUse((TOOL,), "required").structured()
            assert required is not None
            return required.to_grammar(tokenizer)
        case "strict":
            return FreeCalls(ToolUse((TOOL,), strict=frozenset("f")), None, "tools").to_grammar(tokenizer)
    return GRAMMAR


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 259) for _ in range(rng.randint(2, 24))] for _ in range(NUM_PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("option", [*OPTIONS, *GRAMMARS])
async def test_the_text_is_the_same_on_off_and_after_a_failover(
    real_fleet: Any, tiny: Path, option: str, sampling: str
) -> None:
    if option in GRAMMARS:
        pytest.importorskip("llguidance")
        asked = {"logits": sequence.LogitsOptions(repetition_penalty=1, grammar=grammar(option, tiny))}
    else:
        asked = OPTIONS[option]
    fields = SAMPLINGS[sampling] | asked
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
        assert option != "phrases" or not any(a == b < 200 for a, b in pairwise(plain))
        moved += failovers
    assert moved >= NUM_PROMPTS // 2, "most answers were longer than what was said before the failure"


@pytest.mark.slow
async def test_several_answers_to_one_prompt_are_each_the_same_after_a_failover(real_fleet: Any) -> None:
    """As a gateway asks for `n`: at once, each with a seed of its own."""

    def asked(prompt: list[int], number: int, mode: router.SpeculationMode.ValueType) -> router.RouteRequest:
        sampling = sequence.Sampling(temperature=0.8, top_p=0.95, seed=3 + number)
        fields = {"sampling": sampling, "seeded": True, "speculation": mode, "request_id": f"{mode}-{number}"}
        request: router.RouteRequest = real_fleet.request(prompt, NUM_TOKENS, model="tiny", **fields)
        return request

    moved = 0
    for prompt in prompts()[:5]:
        plain = [
            await _answered(real_fleet, asked(prompt, number, router.SPECULATION_MODE_OFF), fails=False)
            for number in range(NUM_ANSWERS)
        ]
        taken_over = await asyncio.gather(
            *(
                _answered(real_fleet, asked(prompt, number, router.SPECULATION_MODE_ON), fails=not number)
                for number in range(NUM_ANSWERS)
            )
        )
        assert [said for said, _ in taken_over] == [said for said, _ in plain]
        assert len({tuple(said) for said, _ in plain}) == NUM_ANSWERS
        moved += sum(failovers for _, failovers in taken_over)
    assert moved >= NUM_ANSWERS, "answers were longer than what was said before the failure"


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
