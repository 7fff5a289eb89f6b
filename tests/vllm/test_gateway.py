"""What a gateway and a router make of an answer of a target on vLLM: choices, stop strings, tool calls, quotas, traces,
bills."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from outrider.gateway.config import GatewayConfig
from outrider.gateway.server import RunningGateway, running
from outrider.metadata import MetadataStore
from outrider.rpc.v1 import router_pb2, tenants_pb2
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.bills import billed, spent
from tests.integration.gateway.test_tools import ASKED, CLOCK, WEATHER
from tests.integration.router.conftest import Fleet, fleet, metadata_url
from tests.integration.router.test_traces import check_adds_up, ended_trace
from tests.integration.target.test_server import until
from tests.redis_server import EmbeddedServer
from tests.vllm.test_fleet import engine, gateway, stack

__all__ = ["engine", "fleet", "gateway", "metadata_url", "stack"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = [40, 41, 42, 40, 41]
# Some of the text repeats itself, and is looked up.
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 60, "logit_bias": {"40": 8, "41": 7}}
MORE = {"ignore_eos": True, "include_metrics": True}


def client_of(gateway: RunningGateway, key: str = "x") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{gateway.http_address}/v1", api_key=key, max_retries=0, timeout=1200)


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as made:
        yield made


async def complete(client: openai.AsyncOpenAI, speculation: str = "off", **asked: Any) -> Any:
    more = {"extra_body": MORE | {"speculation": speculation}}
    return await client.completions.create(model="tiny", prompt=PROMPT, **SAMPLED | asked, **more)


async def both(stack: Fleet, ask: Callable[[str], Awaitable[Any]]) -> tuple[Any, Any]:
    """Without drafts, and with some that were accepted."""
    stats = stack.targets[0].stats
    before = stats.num_draft_tokens, stats.num_accepted_tokens
    plain = await ask("off")
    assert stats.num_draft_tokens == before[0]
    drafted = await ask("on")
    assert stats.num_accepted_tokens > before[1]
    return plain, drafted


def texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


async def test_n_answers_are_those_of_n_seeds_with_drafts_and_without(stack: Fleet, client: openai.AsyncOpenAI) -> None:
    plain, drafted = await both(stack, lambda way: complete(client, way, n=3))
    alone = [texts(await complete(client, seed=seed))[0] for seed in (7, 8, 9)]
    assert texts(plain) == texts(drafted) == alone and len(set(alone)) == 3


async def test_the_best_of_several_is_the_likeliest_with_drafts_and_without(
    stack: Fleet, client: openai.AsyncOpenAI
) -> None:
    plain, drafted = await both(stack, lambda way: complete(client, way, n=1, best_of=3))
    every = (await complete(client, n=3, logprobs=0)).choices
    best = max(every, key=lambda choice: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))
    assert texts(plain) == texts(drafted) == [best.text]


async def test_a_stop_string_ends_the_text_before_it_with_drafts_and_without(
    stack: Fleet, client: openai.AsyncOpenAI
) -> None:
    [whole] = texts(await complete(client))
    stop = whole[30:33]
    plain, drafted = await both(stack, lambda way: complete(client, way, stop=[stop]))
    assert texts(plain) == texts(drafted) == [whole[: whole.index(stop)]]
    assert {answer.choices[0].finish_reason for answer in (plain, drafted)} == {"stop"}


async def test_calls_of_tools_are_the_same_with_drafts_and_are_what_their_schemas_say(
    stack: Fleet, client: openai.AsyncOpenAI
) -> None:
    cities = {"type": "object", "properties": {"city": {"enum": ["Bern", "Berlin"]}}, "required": ["city"]}
    weather = {"type": "function", "function": WEATHER["function"] | {"parameters": cities}}
    for choice, names in (
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):

        async def ask(way: str) -> Any:
            return await client.chat.completions.create(
                model="tiny",
                messages=[ASKED],
                tools=[weather, CLOCK],
                tool_choice=choice,  # noqa: B023
                parallel_tool_calls=False,
                extra_body={"include_metrics": True, "speculation": way},
                temperature=0.9,
                seed=7,
                max_tokens=200,
            )

        plain, drafted = await both(stack, ask)
        calls = [[call.function for call in answer.choices[0].message.tool_calls] for answer in (plain, drafted)]
        assert calls[0] == calls[1] and {call.name for call in calls[0]} <= names
        for call in calls[0]:
            arguments = json.loads(call.arguments)
            assert call.name == "clock" or arguments["city"] in ("Bern", "Berlin")


async def test_a_quota_ends_the_answers_of_its_tenant(stack: Fleet, tmp_path: Path) -> None:
    assert stack.router is not None
    # So few that the slowest machine uses more than they are filled up with.
    quota = tenants_pb2.Quota(tokens_per_minute=100)
    redis = stack.stack.enter_context(EmbeddedServer.start(tmp_path / "r"))
    store = await stack.stack.enter_async_context(MetadataStore.connect(redis.url, call_timeout_s=2.0))
    await store.tenants.put([tenants_pb2.Tenant(name="acme", quota=quota)], by="test")
    digest, scopes = hashlib.sha256(b"key").digest(), [tenants_pb2.KEY_SCOPE_INFER]
    await store.tenants.add_key(tenants_pb2.ApiKey(id="k", tenant="acme", digest=digest, scopes=scopes), by="test")
    places = {"listen_grpc": "127.0.0.1:0", "listen_http": "127.0.0.1:0", "metadata_url": redis.url}
    config = GatewayConfig(**places, routers=(stack.router.address,))  # type: ignore[arg-type]
    used, began_s = 0, time.monotonic()
    async with running(config) as gateway, client_of(gateway, "key") as client:
        with pytest.raises(openai.RateLimitError):
            for _ in range(30):
                used += (await complete(client, "on")).usage.total_tokens
    # Each is of 65 tokens, and the last one may be begun with one token left.
    assert 65 <= used <= 100 * (1 + (time.monotonic() - began_s) / 60) + 65


async def test_a_trace_and_a_bill_are_what_the_target_did(stack: Fleet) -> None:
    assert stack.router is not None
    [target] = stack.targets
    before, numbers = spent([target.stats], []), itertools.count()
    bias = sp.LogitsOptions(repetition_penalty=1, bias_token_ids=[40], biases=[30])
    for tenant, speculation in (
        ("a", router_pb2.SPECULATION_MODE_ON),
        ("b", router_pb2.SPECULATION_MODE_OFF),
        ("a", router_pb2.SPECULATION_MODE_ON),
    ):
        name = f"r{next(numbers)}"
        asked = {"model": "tiny", "tenant": tenant, "speculation": speculation, "logits": bias}
        answer = await stack.ask(stack.request(PROMPT, request_id=name, **asked), timeout=1200)
        found = await ended_trace(stack, name)
        check_adds_up(found, answer, len(PROMPT))
        assert (found.tenant, found.prompt_tokens, len(answer.token_ids)) == (tenant, len(PROMPT), 40)
        assert any(one.num_accepted for one in found.rounds) == (tenant == "a")
    sums = stack.router.dispatcher.usage.sums
    assert {name: each.requests for name, each in sums.items()} == {"a": 2, "b": 1}
    assert sums["b"].drafted_tokens == 0 < sums["a"].accepted_tokens

    def both_sides_agree() -> bool:
        did = {name: value - before[name] for name, value in spent([target.stats], []).items()}
        return billed(sums.values()) == pytest.approx(did, rel=0.005)

    # What the target says last is on its way.
    await until(both_sides_agree)
