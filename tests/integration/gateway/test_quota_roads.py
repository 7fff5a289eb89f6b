"""A quota of tokens holds on every way to use some, over two gateways and one Redis."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from outrider.metadata import MetadataStore
from outrider.rpc.access.roles import bearer
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, router_pb2, tenants_pb2

from tests.integration.gateway.conftest import OpenGateway, add_key
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, echo, routing, saying
from tests.redis_server import EmbeddedServer

TOKENS_PER_MINUTE = 6000
PROMPT = list(range(30, 60))
LONG = [*PROMPT, *PROMPT]
LONG_CHARS = 1200
TOO_LONG = "ab " * (LONG_CHARS // 3)


@dataclass
class Meter:
    """A router that counts the tokens that it bills."""

    num_billed: int = 0

    async def script(self, request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        answers = echo(30) if request.HasField("logprobs") else saying([40] * 90, size=30)
        self.num_billed += request.billed_prompt_tokens
        async for response in answers(request):
            self.num_billed += len(response.token_ids)
            yield response


@dataclass
class Client:
    """Asks two gateways in turns, as one tenant, until it is refused."""

    urls: list[str]
    stubs: list[generation_pb2_grpc.GenerationServiceStub]
    http: httpx.AsyncClient
    key: str
    num_asked: int = 0
    refused: bool = False
    headers: list[httpx.Headers] = field(default_factory=list)

    async def post(self, path: str, *, allowed: int = 200, **body: Any) -> Any:
        """The body of the answer; None when it was refused. `allowed`: its status else."""
        url = self.urls[self.num_asked % 2] + path
        headers = {"authorization": f"Bearer {self.key}"}
        response = await self.http.post(url, json={"model": MODEL} | body, headers=headers)
        self.headers.append(response.headers)
        assert response.status_code in (429, allowed)
        return self._taken(response.status_code == 429, {} if allowed != 200 else response.json())

    async def generate(self, **fields: Any) -> Any:
        options = generation_pb2.GenerationOptions(max_tokens=90)
        request = generation_pb2.GenerateRequest(model=MODEL, options=options, **fields)
        try:
            answer = await self.stubs[self.num_asked % 2].Generate(request, metadata=bearer(self.key))
        except grpc.aio.AioRpcError as error:
            return self._taken(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error)
        return self._taken(False, answer)

    def _taken(self, refused: bool, answer: Any) -> Any:
        self.num_asked += 1
        self.refused |= refused
        assert refused or not (isinstance(answer, Exception) or "error" in str(answer)[:20]), answer
        return None if refused else answer

    async def completions(self, **body: Any) -> int:
        answer = await self.post("/v1/completions", **({"prompt": PROMPT, "max_tokens": 40, "temperature": 1} | body))
        return answer["usage"]["total_tokens"] if answer else 0

    async def chat(self) -> int:
        messages = [{"role": "user", "content": "What is it that weighs so much?"}]
        answer = await self.post("/v1/chat/completions", messages=messages, max_tokens=40)
        return answer["usage"]["total_tokens"] if answer else 0

    async def tokenize(self) -> int:
        answer = await self.post("/tokenize", prompt="Some text of some length. " * 3)
        return answer["count"] if answer else 0

    async def refused_for_its_length(self, path: str, **body: Any) -> int:
        """A refusal, after the text was read."""
        await self.post(path, allowed=400, **body)
        return 0 if self.refused else LONG_CHARS // 4

    async def detokenize(self) -> int:
        return len(LONG) if await self.post("/detokenize", tokens=LONG) else 0

    async def resume(self) -> int:
        prompt = generation_pb2.TokenPrompt(token_ids=PROMPT)
        answer = await self.generate(tokens=prompt, resume_token_ids=[40] * 80)
        return answer.usage.prompt_tokens + answer.usage.completion_tokens if answer else 0


ROADS: dict[str, Callable[[Client], Awaitable[int]]] = {
    "a prompt": Client.completions,
    "a chat": Client.chat,
    "n": lambda client: client.completions(n=4),
    "best_of": lambda client: client.completions(best_of=3, n=1),
    "prompts": lambda client: client.completions(prompt=[PROMPT, LONG, PROMPT]),
    "prompt_logprobs": lambda client: client.completions(prompt=LONG, max_tokens=2, prompt_logprobs=1),
    "echo": lambda client: client.completions(prompt=LONG, max_tokens=2, echo=True, logprobs=1),
    "echo of the prompt alone": lambda client: client.completions(prompt=LONG, max_tokens=0, echo=True, logprobs=1),
    "tokenize": Client.tokenize,
    "detokenize": Client.detokenize,
    "resume": Client.resume,
    "tokenize what is too long": lambda client: client.refused_for_its_length("/tokenize", prompt=TOO_LONG),
    "count what is too long": lambda client: client.refused_for_its_length(
        "/v1/messages/count_tokens", messages=[{"role": "user", "content": TOO_LONG}]
    ),
    "a prompt that is too long": lambda client: client.refused_for_its_length("/v1/completions", prompt=TOO_LONG),
    "a chat that is too long": lambda client: client.refused_for_its_length(
        "/v1/chat/completions", messages=[{"role": "user", "content": TOO_LONG}]
    ),
}
# One road for each way of counting.
QUICK = {"a chat", "best_of", "prompts", "echo", "tokenize", "detokenize", "resume", "tokenize what is too long"}
UNBILLED = {"tokenize", "detokenize", *(name for name in ROADS if "too long" in name)}


@pytest.fixture
async def serve(
    gateway: OpenGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], Awaitable[tuple[Client, Meter]]]]:
    # With the usual 50 ms a busy machine's store counts as unreachable, and then each gateway grants a part by itself.
    monkeypatch.setattr(MetadataStore, "connect", partial(MetadataStore.connect, call_timeout_s=2.0))
    quota = tenants_pb2.Quota(tokens_per_minute=TOKENS_PER_MINUTE)
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer.start(tmp_path / "r"))
        store = await stack.enter_async_context(MetadataStore.connect(server.url))
        await store.tenants.put([tenants_pb2.Tenant(name="acme", quota=quota)], by="test")
        await add_key(store, "key")

        async def opened() -> tuple[Client, Meter]:
            meter = Meter()
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
            router = await stack.enter_async_context(routing(ScriptedRouter(meter.script)))
            running = [await stack.enter_async_context(gateway(router, metadata_url=server.url)) for _ in range(2)]
            channels = [await stack.enter_async_context(create_channel(one.grpc_address)) for one in running]
            stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
            return Client([f"http://{one.http_address}" for one in running], stubs, http, "key"), meter

        yield opened


@pytest.mark.parametrize(
    "road", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ROADS]
)
async def test_a_quota_holds_on_every_road_within_two_percent(serve: Any, road: str) -> None:
    client, meter = await serve()
    used, started_s = 0, time.monotonic()
    while not client.refused:
        last = await ROADS[road](client)
        used += last
    allowed = TOKENS_PER_MINUTE * (1 + (time.monotonic() - started_s) / 60)
    # The last request may be begun with a single token left.
    assert 0.98 * allowed <= used <= 1.02 * allowed + used / client.num_asked
    if road not in UNBILLED:
        assert meter.num_billed == pytest.approx(used, rel=0.02)


async def test_an_answer_says_what_the_quota_leaves_as_openai_does(serve: Any) -> None:
    client, _ = await serve()
    used = sum([await client.completions() for _ in range(4)])
    headers = client.headers[-1]
    assert headers["x-ratelimit-limit-tokens"] == str(TOKENS_PER_MINUTE)
    assert int(headers["x-ratelimit-remaining-tokens"]) == pytest.approx(TOKENS_PER_MINUTE - used, rel=0.05)
    assert headers["x-ratelimit-reset-tokens"].endswith("s")
    assert "x-ratelimit-limit-requests" not in headers
