"""A real RouterService that says what a script tells it to. Also a process of its own, for tests that kill one:

python scripted_router.py PORT TOKENIZER_FILE PAUSE_S TOKEN_ID...
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from outrider.errors import Code, OutriderError
from outrider.protocol.errors import to_route_error
from outrider.protocol.tokenizers import chunks_of, sha256_of
from outrider.rpc.link import answering
from outrider.rpc.outbox import Outbox
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import router_pb2, router_pb2_grpc, sequence_pb2
from outrider.telemetry.context import TraceContext

Script = Callable[[router_pb2.RouteRequest], AsyncIterator[router_pb2.RouteResponse]]
MODEL = "tiny"
CONTEXT = 512
VOCAB = 384
EOS = 2
SERVICE = "outrider.rpc.v1.RouterService"


@cache
def tiny_tokenizer_bytes(template: str = "", added: tuple[str, ...] = ()) -> bytes:
    """What a target of a tiny checkpoint sends; with a chat template and tokens of its own."""
    # Only here: a router in a process of its own is given the bytes, and starts at once.
    from outrider.target.grammars.tokenizer import describe
    from outrider.testing.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(VOCAB - len(added))
    tokenizer.add_tokens(list(added))
    described = describe(tokenizer, (2,))
    if template:
        described.chat_templates["default"] = template
    return described.SerializeToString(deterministic=True)


def round_of(
    token_ids: Sequence[int], accepted: int = 0, drafted: int = 0, verified: int = 0, **more: Any
) -> router_pb2.RouteResponse:
    return router_pb2.RouteResponse(
        token_ids=token_ids,
        num_accepted=accepted,
        num_drafted=drafted,
        num_verified=verified,
        timing=router_pb2.RoundTiming(round_us=2000, draft_us=500, verify_us=1000, queue_us=100),
        **more,
    )


def saying(
    token_ids: Sequence[int],
    *,
    size: int = 1,
    pause_s: float = 0.0,
    finish: sequence_pb2.FinishReason.ValueType = sequence_pb2.FINISH_REASON_STOP,
) -> Script:
    """Gives these output tokens, `size` a round, going on after those the client has already."""

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        start = len(request.resume_token_ids)
        assert list(request.resume_token_ids) == list(token_ids[:start])
        left = token_ids[start : request.stopping.max_new_tokens]
        for at in range(0, len(left), size):
            last = at + size >= len(left)
            kept = left[at : at + size]
            drafted = len(kept) - 1
            yield round_of(
                kept,
                accepted=drafted,
                drafted=drafted,
                verified=drafted,
                num_cached_tokens=3 if at == 0 else 0,
                finish_reason=finish if last else sequence_pb2.FINISH_REASON_UNSPECIFIED,
                metrics=router_pb2.RequestMetrics(num_cached_tokens=3) if last else None,
            )
            await asyncio.sleep(pause_s)

    return script


def refusing(error: OutriderError, after: int = 0) -> Script:
    """Raises the error after so many tokens."""

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        for _ in range(after):
            yield round_of([40])
        raise error

    return script


def logprob(token_id: int) -> float:
    """What the scripted model says of a token, wherever it comes."""
    return -token_id / 100


def logprobs_for(request: router_pb2.RouteRequest, token_id: int) -> sequence_pb2.TokenLogprobs:
    top = [token_id + 1 + i for i in range(request.logprobs.num_top)]
    return sequence_pb2.TokenLogprobs(
        logprob=logprob(token_id), top_token_ids=top, top_logprobs=[logprob(each) for each in top]
    )


def echo(size: int) -> Script:
    """Says the prompt backwards, then as often as the seed says its first token, then stops; `size` tokens a round."""

    async def script(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        prompt = list(request.prompt_token_ids)
        text = [*reversed(prompt), *prompt[:1] * (request.sampling.seed if request.seeded else 0), EOS]
        text = text[: request.stopping.max_new_tokens]
        for at in range(0, len(text), size):
            kept = text[at : at + size]
            response = round_of(kept, num_cached_tokens=1 if at == 0 else 0)
            if at + size >= len(text):
                ended = sequence_pb2.FINISH_REASON_STOP if kept[-1] == EOS else sequence_pb2.FINISH_REASON_LENGTH
                response.finish_reason = ended
            if request.HasField("logprobs"):
                response.logprobs.extend(logprobs_for(request, each) for each in kept)
                if request.logprobs.prompt and at == 0:
                    response.prompt_logprobs.extend(logprobs_for(request, each) for each in prompt[1:])
            yield response
            await asyncio.sleep(0)

    return script


echoing = echo(1)


@dataclass
class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """What it was asked, and how each call ended."""

    script: Script
    models: tuple[str, ...] = (MODEL,)
    max_context_len: int = CONTEXT
    tokenizer_sha256: str = ""
    """Empty: the one that it has."""
    tokenizer: bytes = field(default_factory=tiny_tokenizer_bytes)
    requests: list[router_pb2.RouteRequest] = field(default_factory=list)
    num_running: int = 0
    num_cancelled: int = 0
    timeouts_s: list[float | None] = field(default_factory=list)
    trace_contexts: list[TraceContext] = field(default_factory=list)

    async def RouteMany(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # type: ignore[override]
        # An answer that is cancelled must not interrupt a message: gRPC takes one at a time.
        outbox = Outbox[router_pb2.RouteManyResponse]()
        calls: dict[int, asyncio.Task[None]] = {}

        async def write(**fields: Any) -> None:
            outbox.put(router_pb2.RouteManyResponse(**fields))
            await outbox.idle.wait()

        async with answering(context, outbox):
            try:
                while (message := await context.read()) is not grpc.aio.EOF:
                    for call in message.calls:
                        calls[call.call_id] = asyncio.create_task(self._answer(call, write))
                    for call_id in message.cancelled:
                        calls[call_id].cancel()
            finally:
                for task in calls.values():
                    task.cancel()
                await asyncio.gather(*calls.values(), return_exceptions=True)

    async def _answer(self, call: router_pb2.RouteCall, write: Callable[..., Any]) -> None:
        self.requests.append(call.request)
        self.trace_contexts.append(TraceContext.named(call.request.traceparent, call.request.tracestate))
        self.timeouts_s.append(call.timeout_us / 1e6 if call.timeout_us else None)
        self.num_running += 1
        finished = False
        try:
            async for response in self.script(call.request):
                response.call_id = call.call_id
                finished = bool(response.finish_reason)
                await write(responses=[response])
            if not finished:
                # Without a reason: what a call that broke off looks like.
                code = Code.UNAVAILABLE
                await write(errors=[router_pb2.RouteError(call_id=call.call_id, code=code)])
        except OutriderError as error:
            await write(errors=[to_route_error(call.call_id, error)])
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse(
            models=[
                router_pb2.ServedModel(
                    model=name,
                    max_context_len=self.max_context_len,
                    vocab_size=VOCAB,
                    tokenizer_sha256=self.tokenizer_sha256 or sha256_of(self.tokenizer),
                    num_targets=1,
                )
                for name in self.models
            ]
        )

    async def GetTokenizer(
        self, request: router_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[router_pb2.GetTokenizerResponse]:
        for chunk in chunks_of(self.tokenizer):
            yield router_pb2.GetTokenizerResponse(chunk=chunk)


@asynccontextmanager
async def routing(router: ScriptedRouter, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """The router on its port; broken off at the end of the block."""
    server = create_server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    async with serving(server, address, services=[SERVICE], grace_s=0) as life:
        await life.ready()
        yield life.address


async def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a fact about another party that tells nobody. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _main(port: str, tokenizer: str, pause_s: str, *token_ids: str) -> None:
    script = saying([int(i) for i in token_ids], pause_s=float(pause_s))
    async with routing(ScriptedRouter(script, tokenizer=Path(tokenizer).read_bytes()), f"127.0.0.1:{port}") as address:
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
