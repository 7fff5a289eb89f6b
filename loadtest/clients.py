"""Times one streamed answer over HTTP or public gRPC. For Locust's greenlets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from typing import Any, Protocol

import grpc
from geventhttpclient import HTTPClient
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, router_pb2

from loadtest.outcomes import Outcome
from loadtest.settings import Tenant

TIMEOUT_S = 120.0
"""How long a client waits for an answer."""
_MODES = {
    "auto": router_pb2.SPECULATION_MODE_AUTO,
    "on": router_pb2.SPECULATION_MODE_ON,
    "off": router_pb2.SPECULATION_MODE_OFF,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a stream; the last one has the token counts."""

    has_tokens: bool
    counts: dict[str, int] | None = None


class Client(Protocol):
    def pieces(self, tenant: Tenant, prompt: str) -> Iterator[Piece]:
        """The pieces of an answer as they arrive.

        Raises OSError, grpc.RpcError or RequestFailed; HTTPException, ValueError or LookupError for a broken answer.
        """

    def close(self) -> None: ...


class RequestFailed(Exception):
    """The server refused the request or broke off. The message has the reason, and no text of a prompt."""


def ask(client: Client, tenant: Tenant, prompt: str) -> Outcome:
    """Sends one request and times it; an error is recorded in the outcome."""
    taken = _Taken(tenant.name)
    try:
        for piece in client.pieces(tenant, prompt):
            taken.piece(piece)
        if taken.counts is None:
            raise RequestFailed("the stream ended without a finish")
    except grpc.RpcError as error:
        return taken.outcome(error=error.code().name)
    except (OSError, RequestFailed) as error:
        return taken.outcome(error=str(error) or type(error).__name__)
    except (HTTPException, ValueError, LookupError) as error:
        return taken.outcome(error=f"broken answer: {type(error).__name__}")
    return taken.outcome()


@dataclass(slots=True)
class _Taken:
    """The pieces received so far, with their times."""

    tenant: str
    sent_s: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.perf_counter)
    arrivals_s: list[float] = field(default_factory=list)
    counts: dict[str, int] | None = None

    def piece(self, piece: Piece) -> None:
        if piece.has_tokens:
            self.arrivals_s.append(time.perf_counter())
        self.counts = piece.counts or self.counts

    def outcome(self, error: str = "") -> Outcome:
        # An answer without text, or an error, has come when it is over.
        since_ms = [(at_s - self.started_s) * 1e3 for at_s in self.arrivals_s or [time.perf_counter()]]
        return Outcome(
            tenant=self.tenant,
            sent_s=self.sent_s,
            error=error,
            ttft_ms=since_ms[0],
            # Until the last token, as in the definition of TPOT; usage and metrics may arrive slightly later.
            e2e_ms=since_ms[-1],
            itl_ms=tuple(after - before for before, after in pairwise(since_ms)),
            **(self.counts or {}),
        )


class GrpcClient:
    """One user's own connection. Needs `grpc.experimental.gevent`."""

    def __init__(self, address: str, model: str, api_key: str = "") -> None:
        self._model = model
        self._channel = _channel(address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._metadata = _metadata(api_key)

    def pieces(self, tenant: Tenant, prompt: str) -> Iterator[Piece]:
        message = generation_pb2.ChatMessage(role="user", content=prompt)
        request = generation_pb2.GenerateRequest(
            model=self._model,
            chat=generation_pb2.ChatPrompt(messages=[message]),
            options=generation_pb2.GenerationOptions(
                max_tokens=tenant.max_tokens,
                temperature=tenant.temperature,
                speculation=_MODES[tenant.speculation],
                include_metrics=True,
            ),
        )
        call = self._stub.StreamGenerate(
            generation_pb2.StreamGenerateRequest(request=request), timeout=TIMEOUT_S, metadata=self._metadata
        )
        for chunk in call:
            yield Piece(bool(chunk.token_ids), _grpc_counts(chunk) if chunk.finish_reason else None)

    def close(self) -> None:
        self._channel.close()


def _channel(address: str) -> grpc.Channel:
    # Without this option channels to one address share a connection, and so its limit on concurrent calls.
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _grpc_counts(chunk: generation_pb2.StreamGenerateResponse) -> dict[str, int]:
    sums = chunk.metrics.speculative_decoding
    return {
        "prompt_tokens": chunk.usage.prompt_tokens,
        "cached_tokens": chunk.usage.cached_tokens,
        "completion_tokens": chunk.usage.completion_tokens,
        "verified_tokens": sums.num_verified_tokens,
        "accepted_tokens": sums.num_accepted_draft_tokens,
        "drafted_rounds": sums.num_spec_steps,
    }


class HttpClient:
    """One user's own keep-alive connection."""

    def __init__(self, address: str, model: str, api_key: str = "") -> None:
        host, _, port = address.rpartition(":")
        self._client = HTTPClient(host, int(port), concurrency=1, connection_timeout=10.0, network_timeout=TIMEOUT_S)
        self._model = model
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def pieces(self, tenant: Tenant, prompt: str) -> Iterator[Piece]:
        body = {
            "model": self._model,
            "temperature": tenant.temperature,
            "speculation": tenant.speculation,
            "stream": True,
            "include_metrics": True,
            **_asked(tenant, prompt),
            **tenant.body,
        }
        with self._client.post(f"/v1/{tenant.endpoint}", body=json.dumps(body), headers=self._headers) as response:
            if response.status_code != 200:
                raise RequestFailed(f"HTTP {response.status_code}")
            yield from map(_http_piece, _events(response))

    def close(self) -> None:
        self._client.close()


def _asked(tenant: Tenant, prompt: str) -> dict[str, Any]:
    """The request fields whose names differ by endpoint."""
    limit, usage = {"max_tokens": tenant.max_tokens}, {"stream_options": {"include_usage": True}}
    match tenant.endpoint:
        case "responses":
            return {"input": prompt, "max_output_tokens": tenant.max_tokens}
        case "completions":
            return {"prompt": prompt} | limit | usage
        case _:
            return {"messages": [{"role": "user", "content": prompt}]} | limit | usage


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Server-sent events up to the last. Raises RequestFailed for an error event."""
    while line := response.readline(sep=b"\n"):
        if not line.startswith(b"data: "):
            continue
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if event.get("type") == "error" or "error" in event:
            error = event.get("error", event)
            raise RequestFailed(f"in the stream: {error.get('code') or error.get('type')}")
        yield event
    response.read()


def _http_piece(event: dict[str, Any]) -> Piece:
    if "type" in event:
        return _responses_piece(event)
    choice = event["choices"][0] if event["choices"] else {}
    delta = choice.get("delta", choice)
    # The first event of a stream has a role but no text, so it is no token.
    has_tokens = any(delta.get(name) for name in ("content", "text", "reasoning_content", "tool_calls"))
    usage = event.get("usage")
    if not usage:
        return Piece(has_tokens)
    counts = _counts(event, usage["prompt_tokens"], usage["prompt_tokens_details"], usage["completion_tokens"])
    return Piece(has_tokens, counts)


def _responses_piece(event: dict[str, Any]) -> Piece:
    """The piece in an event of /v1/responses."""
    if event["type"] not in ("response.completed", "response.incomplete"):
        return Piece(event["type"].endswith(".delta"))
    usage = event["response"]["usage"]
    counts = _counts(event["response"], usage["input_tokens"], usage["input_tokens_details"], usage["output_tokens"])
    return Piece(False, counts)


def _counts(answer: dict[str, Any], prompt: int, details: dict[str, int], completion: int) -> dict[str, int]:
    sums = answer["metrics"]["speculative_decoding"]
    return {
        "prompt_tokens": prompt,
        "cached_tokens": details["cached_tokens"],
        "completion_tokens": completion,
        "verified_tokens": sums["num_verified_tokens"],
        "accepted_tokens": sums["num_accepted_draft_tokens"],
        "drafted_rounds": sums["num_spec_steps"],
    }


CLIENTS: dict[str, Callable[[str, str, str], Client]] = {"http": HttpClient, "grpc": GrpcClient}
"""By protocol: makes a client from an address, a model and an API key."""
