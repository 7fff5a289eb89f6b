"""Collects the routers' knowledge of requests, so that operators need only the control plane's address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from outrider.errors import Code, InvalidRequest, OutriderError, Unavailable, UnknownRequest
from outrider.limits import MAX_LABEL_CHARS
from outrider.metadata import LeaseRecord, MetadataStore
from outrider.protocol.tokenizers import joined
from outrider.rpc.access.roles import ClusterSecret, Role, bearer
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import router_pb2_grpc, trace_pb2_grpc
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import worker_pb2 as worker

MAX_SEQUENCES, _SEQUENCES = 10_000, 1000
_TIMEOUT_S = 5.0
_TOKENIZER_TIMEOUT_S = _EXPORT_S = 60.0

T = TypeVar("T")
FindCall = Callable[["trace_pb2_grpc.TraceServiceAsyncStub"], Callable[..., Awaitable[T]]]


class Routers:
    """Calls the routers; keeps no state."""

    def __init__(self, leases: MetadataStore, secret: ClusterSecret | None, connect: Connect = create_channel) -> None:
        self._leases = leases
        self._connect = connect
        self._credential = bearer(secret.token(Role.CONTROL)) if secret is not None else ()

    async def ListSequences(self, request: control.ListSequencesRequest, _: object) -> control.ListSequencesResponse:
        if request.limit > MAX_SEQUENCES:
            raise InvalidRequest("limit", f"{request.limit}; at most {MAX_SEQUENCES}")
        limit = request.limit or _SEQUENCES
        asked = trace.GetActivityRequest(max_sequences=limit, tenant=request.tenant, worker_id=request.worker_id)
        answers, failed = await self._ask_all(lambda stub: stub.GetActivity, asked)
        found = [sequence for answer in answers for sequence in answer.sequences]
        found.sort(key=lambda sequence: sequence.started_unix_us)
        return control.ListSequencesResponse(
            sequences=found[:limit],
            num_sequences=sum(answer.num_sequences for answer in answers),
            unreachable_routers=sorted(failed),
        )

    async def ListActivities(self, request: control.ListActivitiesRequest, _: object) -> control.ListActivitiesResponse:
        asked = trace.GetActivityRequest()
        answers, failed = await self._ask_all(lambda stub: stub.GetActivity, asked)
        sums: dict[tuple[str, str], trace.Activity] = {}
        for one in (activity for answer in answers for activity in answer.activities):
            _add(sums.setdefault((one.worker_id, one.tenant), trace.Activity()), one)
        return control.ListActivitiesResponse(
            activities=[sums[name] for name in sorted(sums)], unreachable_routers=sorted(failed)
        )

    async def ExportTraces(
        self, request: control.ControlServiceExportTracesRequest, _: object
    ) -> AsyncIterator[control.ControlServiceExportTracesResponse]:
        """Of one router after the other. Raises Unavailable at the end if one did not answer."""
        failed = []
        for record in await self._leases.workers(worker.WORKER_ROLE_ROUTER):
            async with self._connect(record.address) as channel:
                stub = trace_pb2_grpc.TraceServiceStub(channel)
                try:
                    async for answer in stub.ExportTraces(request.filter, timeout=_EXPORT_S, metadata=self._credential):
                        yield control.ControlServiceExportTracesResponse(trace=answer.trace)
                except grpc.RpcError as error:
                    failed.append(f"{record.info.worker_id}: {from_rpc_error(error)}")
        if failed:
            raise Unavailable(f"not all routers sent their traces: {'; '.join(failed)}")

    async def GetTrace(
        self, request: control.ControlServiceGetTraceRequest, _: object
    ) -> control.ControlServiceGetTraceResponse:
        """Raises UnknownRequest, or a router's own error if no other router knows the request."""
        request_id = request.request_id
        if not 0 < len(request_id) <= MAX_LABEL_CHARS:
            raise InvalidRequest("request_id", f"has to have 1 to {MAX_LABEL_CHARS} characters")
        asked = trace.GetTraceRequest(request_id=request_id)
        answers, failed = await self._ask_all(lambda stub: stub.GetTrace, asked)
        parts = [part for answer in answers for part in answer.traces]
        if parts:
            parts.sort(key=lambda part: (part.resumed_tokens, part.started_unix_us))
            return control.ControlServiceGetTraceResponse(traces=parts)
        for router_id, error in failed.items():
            if error.code is not Code.NOT_FOUND:
                raise Unavailable(f"{router_id} did not answer, and no other router knows it: {error}")
        raise UnknownRequest(
            f"no router knows {request_id!r}: never carried, or forgotten since (each remembers its last ones)"
        )

    async def tokenizer(self, model: str, sha256: str) -> bytes:
        """A serialised Tokenizer, from the first router that has it. Raises Unavailable."""
        asked = router.GetTokenizerRequest(model=model, tokenizer_sha256=sha256)
        problem: OutriderError = Unavailable("no router holds a lease")
        for record in await self._leases.workers(worker.WORKER_ROLE_ROUTER):
            async with self._connect(record.address) as channel:
                call = router_pb2_grpc.RouterServiceStub(channel).GetTokenizer(
                    asked, timeout=_TOKENIZER_TIMEOUT_S, metadata=self._credential
                )
                try:
                    return await joined((part.chunk async for part in call), sha256)
                except grpc.RpcError as error:
                    problem = from_rpc_error(error)
        raise Unavailable(f"no router sends this tokenizer: {problem}")

    async def _ask_all(self, find: FindCall[T], request: Message) -> tuple[list[T], dict[str, OutriderError]]:
        """The routers' answers to a call of their TraceService, and by router id the errors."""
        answers: list[T] = []
        failed: dict[str, OutriderError] = {}

        async def ask(record: LeaseRecord) -> None:
            async with self._connect(record.address) as channel:
                call = find(trace_pb2_grpc.TraceServiceStub(channel))
                try:
                    answers.append(await call(request, timeout=_TIMEOUT_S, metadata=self._credential))
                except grpc.RpcError as error:
                    failed[record.info.worker_id] = from_rpc_error(error)

        await asyncio.gather(*map(ask, await self._leases.workers(worker.WORKER_ROLE_ROUTER)))
        return answers, failed


def _add(found: trace.Activity, one: trace.Activity) -> None:
    found.tenant, found.worker_id = one.tenant, one.worker_id
    found.num_running += one.num_running
    found.num_ended += one.num_ended
    found.output_tokens += one.output_tokens
    found.num_draft_tokens += one.num_draft_tokens
    found.num_verified_tokens += one.num_verified_tokens
    found.num_accepted_draft_tokens += one.num_accepted_draft_tokens
