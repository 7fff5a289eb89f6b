"""Malformed requests to a gateway, over HTTP and gRPC, and what comes of them. Counts ends; judges nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import grpc
import httpx
from outrider.rpc.v1 import generation_pb2, router_pb2, sequence_pb2

from tests.integration.gateway.scripted_router import MODEL, round_of
from tests.mutations import mutated_bytes, mutated_json

_NUM_AT_ONCE = 16
Ends = Counter[str]
"""Endpoint and status → how many."""
_OPTIONS = {
    "model": MODEL,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "max_tokens": 8,
    "stop": ["x", "yz"],
    "stop_token_ids": [9],
    "speculation": "auto",
    "max_draft_tokens": 3,
    "include_metrics": True,
    "metadata": {"a": "b"},
    "stream": False,
}
_STREAMING = {"stream": True, "stream_options": {"include_usage": True}}
_COMPLETIONS = [
    _OPTIONS | {"prompt": "Say it"},
    _OPTIONS | {"prompt": [5, 6, 7], "logprobs": None, "n": 1},
    _OPTIONS | _STREAMING | {"prompt": ["Say it"], "echo": False},
]
_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
]
_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
_CHATS: list[dict[str, Any]] = [
    _OPTIONS | {"messages": _MESSAGES[:2]},
    _OPTIONS | _STREAMING | {"messages": _MESSAGES[1:2], "tools": [], "response_format": {"type": "text"}},
    {"model": MODEL, "messages": _MESSAGES[1:], "tools": [_TOOL], "tool_choice": "none"},
]
_REQUEST = generation_pb2.GenerateRequest(
    model=MODEL,
    text="Say it",
    options=generation_pb2.GenerationOptions(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=7, max_tokens=8, stop=["x"], stop_token_ids=[9]
    ),
    resume_token_ids=[5, 6],
)
_CHAT_REQUEST = generation_pb2.GenerateRequest(
    model=MODEL,
    chat=generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="Hi")]),
)
_TOKENS_REQUEST = generation_pb2.GenerateRequest(model=MODEL, tokens=generation_pb2.TokenPrompt(token_ids=[5, 6, 7]))
_REQUESTS = [request.SerializeToString() for request in (_REQUEST, _CHAT_REQUEST, _TOKENS_REQUEST)]
_STREAMS = [
    generation_pb2.StreamGenerateRequest(request=request).SerializeToString()
    for request in (_REQUEST, _CHAT_REQUEST, _TOKENS_REQUEST)
]
_DETOKENIZE = [generation_pb2.DetokenizeRequest(model=MODEL, token_ids=[5, 6, 7]).SerializeToString()]
_SERVICE = "/outrider.rpc.v1.GenerationService"
_CALLS = {
    f"{_SERVICE}/Generate": _REQUESTS,
    f"{_SERVICE}/StreamGenerate": _STREAMS,
    f"{_SERVICE}/Detokenize": _DETOKENIZE,
}
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
_BODY = json.dumps(_COMPLETIONS[0]).encode()
_RAW = [
    _HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY,
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(_BODY) + _BODY + b"\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
]


async def answer_anything(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
    """The router's part."""

    def said(*token_ids: int) -> dict[str, Any]:
        each = sequence_pb2.TokenLogprobs(logprob=-1.0)
        return {"token_ids": token_ids, "logprobs": [each] * len(token_ids) if request.HasField("logprobs") else []}

    prompt = request.prompt_token_ids[1:] if request.logprobs.prompt else ()
    yield round_of(**said(40), prompt_logprobs=[sequence_pb2.TokenLogprobs(logprob=-1.0) for _ in prompt])
    yield round_of(**said(41, 2), finish_reason=sequence_pb2.FINISH_REASON_STOP)


async def http_bodies(address: str, num: int, seed: int) -> Ends:
    """Bodies with faults to both endpoints. A status of a stream is that of its head, or of an error event in it."""
    endpoints = {"/v1/completions": _COMPLETIONS, "/v1/chat/completions": _CHATS}
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http:

        async def send(number: int) -> str:
            random = Random(f"{seed} {number}")
            path, samples = random.choice(list(endpoints.items()))
            if random.random() < 0.5:
                content = mutated_json(random, samples)
            else:
                content = mutated_bytes(random, [json.dumps(sample).encode() for sample in samples])
            answer = await http.post(path, content=content, headers={"content-type": "application/json"})
            return f"{path} {_status(answer)}"

        return await _each(num, send)


def _status(answer: httpx.Response) -> str:
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        return "200" if answer.text.endswith("data: [DONE]\n\n") else f"200, then {answer.text[-300:]}"
    if answer.status_code >= 400:
        error = answer.json()["error"]
        # Each says what is wrong, and where, if it is a field.
        return str(answer.status_code) if error["message"] else "without a message"
    return str(answer.status_code)


async def http_requests(address: str, num: int, seed: int) -> Ends:
    """Whole requests with faults, head and all, and connections that are given up at any point."""
    host, _, port = address.rpartition(":")

    async def send(number: int) -> str:
        random = Random(f"{seed} {number}")
        data = mutated_bytes(random, _RAW)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            if random.random() < 0.3:
                return "raw left"
            if random.random() < 0.5:
                writer.write_eof()
            # Faults that leave the gateway waiting for the rest of a request end by its time-outs.
            answer = await reader.read()
            return f"raw {answer[9:12].decode() or 'closed'}"
        except ConnectionError:
            return "raw closed"
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    return await _each(num, send)


async def grpc_messages(address: str, num: int, seed: int) -> Ends:
    """So many messages with faults to each method."""
    async with grpc.aio.insecure_channel(address) as channel:
        ends: Ends = Counter()
        for path, samples in _CALLS.items():

            async def send(number: int, path: str = path, samples: list[bytes] = samples) -> str:
                data = mutated_bytes(Random(f"{seed} {number}"), samples)
                # Without a serializer: bytes go out as they are.
                unary: Any = channel.unary_unary(path)
                stream: Any = channel.unary_stream(path)
                try:
                    if path.endswith("StreamGenerate"):
                        async for _ in stream(data, timeout=60):
                            pass
                    else:
                        await unary(data, timeout=60)
                except grpc.aio.AioRpcError as error:
                    return f"{path} {error.code().name}"
                return f"{path} OK"

            ends += await _each(num, send)
        return ends


async def _each(num: int, send: Callable[[int], Awaitable[str]]) -> Ends:
    """`send` for each number, several at once."""
    numbers = iter(range(num))
    ends: Ends = Counter()

    async def work() -> None:
        for number in numbers:
            ends[await send(number)] += 1

    await asyncio.gather(*(work() for _ in range(_NUM_AT_ONCE)))
    return ends


def bad_ends(ends: Ends) -> Ends:
    """Those that are nobody's fault but the gateway's."""
    fine = ("200", "400", "404", "405", "408", "411", "413", "415", "431", "closed", "left")
    fine_codes = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED")
    return Counter({end: num for end, num in ends.items() if not end.endswith((*fine, *fine_codes))})
