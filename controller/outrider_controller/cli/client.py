"""Calls to a gateway: answers to prompts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from outrider.errors import OutriderError
from outrider.rpc.access.roles import bearer
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, router_pb2

from outrider_controller.cli.clusters.contexts import api_key
from outrider_controller.cli.clusters.control import gateway_channel
from outrider_controller.cli.exits import CommandError, ExitCode

SPECULATION_MODES = {
    "auto": router_pb2.SPECULATION_MODE_AUTO,
    "on": router_pb2.SPECULATION_MODE_ON,
    "off": router_pb2.SPECULATION_MODE_OFF,
}

MAX_DETOKENIZED = 65_536
"""Tokens in one request."""
OnChunk = Callable[[generation_pb2.StreamGenerateResponse], None]


@dataclass(slots=True)
class GatewayAnswer:
    """One finished answer, with times of this process's monotonic clock."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    usage: generation_pb2.Usage = field(default_factory=generation_pb2.Usage)
    metrics: generation_pb2.Metrics = field(default_factory=generation_pb2.Metrics)
    seconds: float = 0.0
    """Request sent to last token received."""
    first_token_s: float = 0.0
    """Request sent to first token received."""
    id: str = ""
    """Under which `outrider trace` finds it."""
    receipt: str = ""

    @property
    def sums(self) -> router_pb2.RequestMetrics:
        return self.metrics.speculative_decoding

    @property
    def tokens_per_second(self) -> float:
        """Over the whole request."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0

    @property
    def decode_s(self) -> float:
        """First token to last: len(token_ids) - 1 tokens."""
        return self.seconds - self.first_token_s


class Gateway:
    """The public gRPC API of one gateway. For `async with`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._credential = bearer(api_key(address))

    async def __aenter__(self) -> Gateway:
        self._channel = gateway_channel(self.address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def stream(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[generation_pb2.StreamGenerateResponse]:
        """Messages as they come. Raises CommandError."""
        message = generation_pb2.StreamGenerateRequest(request=request)
        call = self._stub.StreamGenerate(message, timeout=timeout_s, metadata=self._credential)
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise self._refused(from_rpc_error(error)) from error
        finally:
            # grpc.aio cancels no call that is merely let go of: it would keep its place among the connection's.
            call.cancel()

    async def receipt_key(self) -> str:
        """The gateway's public key, in PEM. Raises CommandError."""
        try:
            return (await self._stub.GetReceiptKey(generation_pb2.GetReceiptKeyRequest())).pem
        except grpc.RpcError as error:
            raise self._refused(from_rpc_error(error)) from error

    async def token_bytes(self, model: str, token_ids: Sequence[int], *, chat: bool) -> list[bytes]:
        """The text of each token; `chat`: of an answer to one. Raises CommandError."""
        found: list[bytes] = []
        try:
            for start in range(0, len(token_ids), MAX_DETOKENIZED):
                some = token_ids[start : start + MAX_DETOKENIZED]
                asked = generation_pb2.DetokenizeRequest(model=model, token_ids=some, chat=chat)
                found += (await self._stub.Detokenize(asked, metadata=self._credential)).tokens
        except grpc.RpcError as error:
            raise self._refused(from_rpc_error(error)) from error
        return found

    def _refused(self, error: OutriderError) -> CommandError:
        refused = CommandError.of(error, f"gateway at {self.address}")
        if refused.exit_code is not ExitCode.DENIED or self._credential:
            return refused
        # What the gateway says of HTTP headers is no help here.
        where = "OUTRIDER_API_KEY, or outrider config set-context --api-key-file"
        message = f"gateway at {self.address}: it asks for an API key: {where}"
        return CommandError(message, refused.exit_code, reason=refused.reason)

    async def answer(
        self,
        request: generation_pb2.GenerateRequest,
        timeout_s: float | None = None,
        on_chunk: OnChunk = lambda chunk: None,
    ) -> GatewayAnswer:
        """The whole answer; each message also goes to `on_chunk`. Raises CommandError."""
        answer = GatewayAnswer()
        started_s = time.monotonic()
        async for chunk in self.stream(request, timeout_s):
            now_s = time.monotonic() - started_s
            if chunk.token_ids:
                answer.first_token_s = answer.first_token_s or now_s
                answer.seconds = now_s
            answer.id = chunk.id
            answer.text += chunk.text
            answer.token_ids.extend(chunk.token_ids)
            if chunk.finish_reason:
                answer.finish_reason = chunk.finish_reason
                answer.usage, answer.metrics, answer.receipt = chunk.usage, chunk.metrics, chunk.receipt
            on_chunk(chunk)
        return answer


def apply_prompt(request: generation_pb2.GenerateRequest, prompt: str, *, raw: bool = False, system: str = "") -> None:
    """As a user's message after the system's, or raw, as text to be continued."""
    if raw:
        request.text = prompt
        return
    if system:
        request.chat.messages.add(role="system", content=system)
    request.chat.messages.add(role="user", content=prompt)
