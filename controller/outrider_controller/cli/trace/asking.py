"""Where traces come from: every router that holds a lease, and the gateway for what tokens stand for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import grpc
from outrider.errors import Code, OutriderError
from outrider.rpc.channel import create_channel
from outrider.rpc.roles import bearer
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2 as generation
from outrider.rpc.v1 import generation_pb2_grpc, trace_pb2_grpc, worker_pb2
from outrider.rpc.v1 import trace_pb2 as trace

from outrider_controller.cli.client import list_workers
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import note
from outrider_controller.cli.trace.tokens import TokenBytes

_TIMEOUT_S = 5.0
_PREFIXES = ("chatcmpl-", "cmpl-")
_AT_ONCE = 65_536


def request_id_of(given: str) -> str:
    """The id as routers know it, from the id of an OpenAI answer, of a gRPC answer, or an x-request-id."""
    for prefix in _PREFIXES:
        given = given.removeprefix(prefix)
    return given


async def routers_of(control: str, given: Sequence[str]) -> list[str]:
    """Addresses to ask. Raises CommandError."""
    if given:
        return list(given)
    answer = await list_workers(control, worker_pb2.WORKER_ROLE_ROUTER)
    if not answer.workers:
        raise CommandError("no router holds a lease", ExitCode.UNAVAILABLE)
    return [status.address for status in answer.workers]


async def fetch(routers: Sequence[str], request_id: str) -> list[trace.RequestTrace]:
    """Every router's part of the request, in the order of the answer. Raises CommandError when there is none."""
    answers = await asyncio.gather(*(_ask(router, request_id) for router in routers))
    parts = [part for answer in answers if not isinstance(answer, OutriderError) for part in answer]
    if parts:
        return sorted(parts, key=lambda part: (part.resumed_tokens, part.started_unix_us))
    faults = [error for error in answers if isinstance(error, OutriderError)]
    other = next((error for error in faults if error.code is not Code.NOT_FOUND), None)
    if other is not None:
        raise CommandError.of(other, f"router at {routers[faults.index(other)]}")
    raise CommandError(
        f"no router knows request {request_id!r}: never carried, or forgotten since (each remembers its last ones)",
        ExitCode.NOT_FOUND,
        reason="UNKNOWN_REQUEST",
    )


async def _ask(router: str, request_id: str) -> Sequence[trace.RequestTrace] | OutriderError:
    async with create_channel(router) as channel:
        stub = trace_pb2_grpc.TraceServiceStub(channel)
        try:
            answer = await stub.GetTrace(
                trace.GetTraceRequest(request_id=request_id),
                timeout=_TIMEOUT_S,
                metadata=bearer(os.environ.get("OUTRIDER_OPERATOR_TOKEN", "")),
            )
        except grpc.RpcError as error:
            return from_rpc_error(error)
        return answer.traces


@dataclass(slots=True)
class Dictionary:
    """What tokens stand for, asked of a gateway as they come. Without one tokens keep their ids."""

    gateway: str
    table: dict[int, bytes] = field(default_factory=dict)
    _gave_up: bool = False

    async def look_up(self, model: str, token_ids: Collection[int]) -> TokenBytes:
        unknown = sorted(set(token_ids) - self.table.keys())
        if unknown and not self._gave_up:
            try:
                async with create_channel(self.gateway) as channel:
                    for start in range(0, len(unknown), _AT_ONCE):
                        await self._ask(channel, model, unknown[start : start + _AT_ONCE])
            except grpc.RpcError as error:
                self._gave_up = True
                note(f"gateway at {self.gateway}: {from_rpc_error(error)}; tokens are shown by their ids")
        return self.table

    async def _ask(self, channel: grpc.aio.Channel, model: str, token_ids: Sequence[int]) -> None:
        request = generation.DetokenizeRequest(model=model, token_ids=token_ids)
        answer = await generation_pb2_grpc.GenerationServiceStub(channel).Detokenize(
            request, timeout=_TIMEOUT_S, metadata=bearer(os.environ.get("OUTRIDER_API_KEY", ""))
        )
        self.table.update(zip(token_ids, answer.tokens, strict=True))
