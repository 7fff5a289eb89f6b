"""A real model answers, and a real draft proposes tokens: the text is the target's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.up.stack import Stack

from benchmarks.support.asking import make_request

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Translate into German: The weather is nice today, and we are going to the park.",
    "Repeat this list backwards: red, green, blue, yellow, black, white, orange.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Show your steps.",
]
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11}


@pytest.mark.parametrize("options", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_speculation_changes_the_time_not_the_text(
    stack: Stack, gateway: Gateway, options: dict[str, Any]
) -> None:
    answers = {}
    for mode in ("off", "on"):
        requests = [make_request(stack.config.model, prompt, mode, max_tokens=24, **options) for prompt in PROMPTS]
        # At once: what one says must not depend on who is beside it.
        answers[mode] = await asyncio.gather(*(gateway.answer(request) for request in requests))
    assert [a.text for a in answers["on"]] == [a.text for a in answers["off"]]
    assert [a.token_ids for a in answers["on"]] == [a.token_ids for a in answers["off"]]
    figures = AnswerFigures.of(answers["on"])
    # How many come in time is the machine's to say. Each that is accepted spares a step; a stop token is not told.
    assert figures.accepted > 0
    assert figures.rounds <= figures.tokens - figures.accepted + len(PROMPTS)


async def test_the_stock_openai_client_streams_the_same_text(stack: Stack, gateway: Gateway) -> None:
    answer = await gateway.answer(make_request(stack.config.model, PROMPTS[0], "auto", max_tokens=32, temperature=0.0))
    async with AsyncOpenAI(base_url=f"http://{stack.gateway_http}/v1", api_key="unused") as client:
        assert [model.id for model in (await client.models.list()).data] == [stack.config.model]
        chunks = await client.chat.completions.create(
            model=stack.config.model,
            messages=[{"role": "user", "content": PROMPTS[0]}],
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in chunks:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    assert text == answer.text
    assert usage is not None and usage.completion_tokens == len(answer.token_ids)
