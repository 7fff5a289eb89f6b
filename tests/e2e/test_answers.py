"""A real model answers, and a real draft proposes tokens: the text is the target's own."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from openai import AsyncOpenAI
from outrider.rpc.v1 import generation_pb2 as generation
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


async def test_stop_strings_end_the_text_before_them(stack: Stack, gateway: Gateway) -> None:
    whole = await gateway.answer(make_request(stack.config.model, PROMPTS[0], "off", max_tokens=32, temperature=0.0))
    stop = whole.text[20:26]
    for mode in ("off", "on"):
        request = make_request(stack.config.model, PROMPTS[0], mode, max_tokens=32, temperature=0.0, stop=[stop])
        answer = await gateway.answer(request)
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.finish_reason == "stop"


async def test_the_command_line_asks_and_lists(stack: Stack) -> None:
    async def outrider(*arguments: str) -> Any:
        command = (sys.executable, "-m", "outrider_controller.cli", *arguments, "-o", "json")
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await child.communicate()
        assert child.returncode == 0
        return json.loads(out)

    where = ("--gateway", stack.gateway_grpc, "--model", stack.config.model)
    answered = await outrider("generate", "Say hello.", *where, "--max-tokens", "8")
    assert answered["schema"] == "outrider/generation/v1"
    assert answered["usage"]["completion_tokens"] == len(answered["token_ids"]) <= 8
    listed = await outrider("get", "workers", "--control", stack.control)
    assert {worker["role"] for worker in listed["workers"]} >= {"target", "draft", "router"}


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature": ("temperature", {"temperature": -1.0}),
    "not a number": ("top_p", {"top_p": float("nan")}),
    "min_p": ("min_p", {"min_p": 1.5}),
    "max_tokens": ("max_tokens", {"max_tokens": 100_000}),
    "max_draft_tokens": ("max_draft_tokens", {"max_draft_tokens": 1000}),
}


async def test_bad_input_is_refused_by_the_name_of_its_field_while_others_go_on(stack: Stack, gateway: Gateway) -> None:
    model = stack.config.model
    running = asyncio.ensure_future(
        gateway.answer(make_request(model, PROMPTS[3], "on", max_tokens=48, temperature=0.0, ignore_eos=True))
    )
    requests = [(field, make_request(model, "Hi", "auto", **options)) for field, options in BAD.values()]
    out_of_vocabulary = generation.GenerateRequest(model=model)
    out_of_vocabulary.tokens.token_ids.extend([1, 2, 10**6])
    too_long = generation.GenerateRequest(model=model, text="word " * 9000)
    requests += [
        ("token_ids", out_of_vocabulary),
        ("context", too_long),
        ("text", generation.GenerateRequest(model=model, text="")),
        ("model", make_request("no-such-model", "Hi", "auto")),
    ]
    for field, request in requests:
        with pytest.raises(Exception, match=field):
            await gateway.answer(request)
    assert len((await running).token_ids) == 48
