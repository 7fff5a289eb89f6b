"""`outrider trace` of requests that the real stack has answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI
from outrider_controller.cli.app import run
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.up.stack import Stack

from benchmarks.support.asking import make_request

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

Outrider = Callable[..., Awaitable[str]]
PROMPT = "Repeat this list: red, green, blue, red, green, blue, red, green, blue."


@pytest.fixture
def outrider(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Outrider:
    """Runs a command that has to succeed; gives what it prints."""

    async def command(*arguments: str) -> str:
        where = ("--control", stack.control) + (() if "export" in arguments else ("--gateway", stack.gateway_grpc))
        capsys.readouterr()
        assert await asyncio.to_thread(run, [*arguments, *where]) == 0
        return capsys.readouterr().out

    return command


async def trace_of(outrider: Outrider, request_id: str) -> dict[str, Any]:
    document = json.loads(await outrider("trace", request_id, "-o", "json"))
    assert document["schema"] == "outrider/trace/v1"
    (part,) = document["traces"]
    return dict(part)


async def answered(stack: Stack) -> tuple[Any, str]:
    """An answer of the stock client, and the id in its header."""
    async with AsyncOpenAI(base_url=f"http://{stack.gateway_http}/v1", api_key="unused") as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=stack.config.model,
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            max_tokens=40,
            extra_body={"speculation": "on"},
        )
    return raw.parse(), raw.headers["x-request-id"]


async def test_the_rounds_of_an_openai_answer_add_up_to_it(stack: Stack, outrider: Outrider) -> None:
    part: dict[str, Any] = {"accepted": 0}
    # On a busy machine the drafts of a whole answer may come too late.
    while not part["accepted"]:
        answer, header = await answered(stack)
        part = await trace_of(outrider, answer.id)
    assert part == await trace_of(outrider, header)
    rounds = part["rounds"]
    assert answer.usage is not None
    assert sum(one["tokens"] for one in rounds) == part["output_tokens"] == answer.usage.completion_tokens
    positions = [one["position"] for one in rounds]
    assert positions == sorted(set(positions)) and positions[0] == answer.usage.prompt_tokens
    assert part["accepted"] == sum(one["accepted"] for one in rounds)
    drafted = [one for one in rounds if one["drafted"]]
    assert all(one["draft_source"] in ("model", "ngram") for one in drafted)
    assert all(one["draft_ms"] > 0 for one in drafted if one["draft_source"] == "model")
    assert all(one["verify_ms"] > 0 and one["wire_ms"] >= 0 for one in rounds)
    # What target and router say of the same time, each by its own clock, is the same time. On a busy machine the router
    # comes late to what the target has sent.
    said = sum(one["wait_ms"] + one["queue_ms"] + one["prefill_ms"] + one["verify_ms"] for one in rounds[1:])
    assert 0.5 < said / sum(one["round_ms"] for one in rounds[1:]) < 1.1


async def test_the_text_is_there_for_people(stack: Stack, gateway: Gateway, outrider: Outrider) -> None:
    request = make_request(stack.config.model, PROMPT, "on", max_tokens=24, temperature=0.0)
    answer = await gateway.answer(request)
    out = await outrider("trace", answer.id)
    assert f"request {answer.id}" in out and "\x1b" not in out
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("round"))
    end = next(i for i, line in enumerate(lines) if line.strip().startswith("sum"))
    rounds = [line for line in lines[start + 1 : end] if line.split()[0].isdigit()]
    assert len(rounds) == answer.sums.num_steps
    words = [word.strip(",.") for word in answer.text.split() if word.strip(",.").isalpha()]
    assert words and all(any(word in line for line in rounds) for word in words if len(word) <= 5)


async def test_generate_prints_its_trace(stack: Stack, outrider: Outrider) -> None:
    arguments = ("generate", "Say hello.", "--model", stack.config.model, "--max-tokens", "8", "--trace")
    assert "first token after" in await outrider(*arguments)
    document = json.loads(await outrider(*arguments, "-o", "json"))
    assert document["schema"] == "outrider/generation/v1"
    assert document["usage"]["completion_tokens"] == len(document["token_ids"]) <= 8
    assert document["traces"][0]["request_id"] == document["id"]
    assert [t for one in document["traces"][0]["rounds"] for t in one["token_ids"]] == document["token_ids"]


async def test_following_ends_with_the_request(stack: Stack, gateway: Gateway, outrider: Outrider) -> None:
    request = make_request(stack.config.model, PROMPT, "on", max_tokens=64, temperature=0.0, ignore_eos=True)
    chunks = gateway.stream(request)
    first = await anext(chunks)
    following = asyncio.ensure_future(outrider("trace", first.id, "--follow"))
    async for _ in chunks:
        pass
    out = await following
    assert "64 tokens in" in out and "ended by length" in out


async def test_an_export_has_the_rounds_of_the_trace_and_no_token(
    stack: Stack, gateway: Gateway, outrider: Outrider
) -> None:
    answer = await gateway.answer(make_request(stack.config.model, PROMPT, "on", temperature=0, max_tokens=30))
    part = await trace_of(outrider, answer.id)
    (line,) = map(json.loads, (await outrider("trace", "export", answer.id)).splitlines())
    assert line["schema"] == "outrider/rounds/v1"
    assert len(line["rounds"]) == len(part["rounds"])
    for ours, one in zip(line["rounds"], part["rounds"], strict=True):
        assert not ours["token_ids"] and not ours["rejected_token_ids"]
        assert len(ours["chances"]) == ours["accepted"] + len(one["rejected_token_ids"])
        assert all(0 <= chance <= 1 for chance in ours["chances"])
        assert {**ours, "token_ids": 0, "rejected_token_ids": 0} == {**one, "token_ids": 0, "rejected_token_ids": 0}
