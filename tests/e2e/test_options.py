"""What clients ask of a real model, through the stock client: the same with a real draft and without."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from outrider_controller.cli.up.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPTS = [
    "Name three colours, and say where one sees them.",
    "Repeat this list backwards: red, green, blue, yellow, black, white, orange.",
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "population": {"type": "integer", "minimum": 0}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
JSON: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
ASKED: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.6, "extra_body": {"repetition_penalty": 1.2}},
    "masks": {"logit_bias": {"28": 3.0}, "extra_body": {"bad_words": ["red", "The"], "min_tokens": 20}},
    "schema": {"response_format": JSON},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
}


QUICK = [("schema", False)]
CASES = [
    pytest.param(name, sampled, marks=[] if (name, sampled) in QUICK else pytest.mark.slow)
    for name in ASKED
    for sampled in (False, True)
]


@pytest.mark.parametrize(("name", "sampled"), CASES)
async def test_speculation_changes_no_answer(stack: Stack, name: str, sampled: bool) -> None:
    if name == "schema":
        pytest.importorskip("llguidance")
    asked = ASKED[name] | ({"temperature": 0.8, "seed": 5} if sampled else {"temperature": 0})
    async with AsyncOpenAI(base_url=f"http://{stack.gateway_http}/v1", api_key="unused", max_retries=0) as client:

        async def answer(prompt: str, speculation: str) -> Any:
            extra = {"extra_body": {**asked.get("extra_body", {}), "speculation": speculation}}
            message: Any = {"role": "user", "content": prompt}
            found = await client.chat.completions.create(
                model=stack.config.model, messages=[message], max_tokens=60, **(asked | extra)
            )
            return found.choices[0]

        plain = await asyncio.gather(*(answer(prompt, "off") for prompt in PROMPTS))
        drafted = await asyncio.gather(*(answer(prompt, "on") for prompt in PROMPTS))
    assert [each.message.content for each in drafted] == [each.message.content for each in plain]
    for one, other in zip(plain, drafted, strict=True):
        text = one.message.content
        if name == "schema" and one.finish_reason == "stop":
            assert set(json.loads(text)) == {"city", "population"}
        if name == "masks":
            assert "red" not in text.split()
        if name == "logprobs":
            assert "".join(each.token for each in one.logprobs.content).startswith(text)
            found = [each.logprob for each in other.logprobs.content]
            assert found == pytest.approx([each.logprob for each in one.logprobs.content], abs=1e-4)
