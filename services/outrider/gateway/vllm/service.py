"""vLLM's gRPC engine service: for other gateways this one is an engine of one model. They do not see the speculation.

The messages are those of the package `smg-grpc-proto`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from outrider.errors import Conflict, NotSupported
from outrider.gateway.generation.choices import Choices
from outrider.gateway.generation.generation import Generator
from outrider.gateway.tenants.auth import check_model, default_tenant
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.vllm.requests import field_paths, logprobs_asked, to_generations
from outrider.gateway.vllm.responses import EngineAnswer
from outrider.protocol.identity import package_version
from outrider.rpc.access.roles import current_caller
from outrider.rpc.channel import remaining_s
from outrider.rpc.link import write_within
from outrider.rpc.v1 import tenants_pb2
from outrider.telemetry.context import TraceContext

SERVICE = "vllm.grpc.engine.VllmEngine"
_CHUNK_BYTES = 64 << 10
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

add_to_server = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server


@dataclass(slots=True)
class _Running:
    """Running requests, for `Abort`: by tenant and the tenant's own request id."""

    _scopes: dict[tuple[str, str], asyncio.Timeout] = field(default_factory=dict)

    @contextmanager
    def named(self, key: tuple[str, str], scope: asyncio.Timeout) -> Iterator[None]:
        """Raises Conflict for an id that is in use. An empty id is not recorded."""
        if key in self._scopes:
            raise Conflict("a request of this id is under way", field="request_id", reason="REQUEST_ID_IN_USE")
        if key[1]:
            self._scopes[key] = scope
        try:
            yield
        finally:
            self._scopes.pop(key, None)

    def abort(self, key: tuple[str, str]) -> None:
        """Ignores an id that is not running."""
        if (scope := self._scopes.pop(key, None)) is not None:
            scope.reschedule(asyncio.get_running_loop().time())


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # The package has no types.
    def __init__(self, core: Generator, model: str, send_timeout_s: float) -> None:
        self._core = core
        self._model = model
        self._send_timeout_s = send_timeout_s
        self._started_s = time.monotonic()
        self._last_received_s = 0.0
        self._running = _Running()

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        self._last_received_s = time.time()
        tenant = _tenant()
        answers: list[EngineAnswer] = []
        try:
            async with asyncio.timeout(None) as aborted:
                with self._running.named((tenant.name, request.request_id), aborted), field_paths():
                    await self._generate(request, tenant, answers, context)
        except TimeoutError:
            if not aborted.expired():
                raise
            for answer in answers:
                if not answer.ended:
                    await write_within(context, answer.complete("abort"), self._send_timeout_s)

    async def _generate(
        self, request: vllm.GenerateRequest, tenant: tenants_pb2.Tenant, answers: list[EngineAnswer], context: Context
    ) -> None:
        """Adds the running answers to `answers`."""
        if request.stream and tenant.pacing == tenants_pb2.PACING_CONSTANT:
            raise NotSupported("stream", "the tenant's streams are paced, and this protocol has no padding")
        asked = logprobs_asked(request.sampling_params)
        async with self._core.start(
            [to_generations(request, self._model)],
            default_max_tokens=None,
            timeout_s=remaining_s(context),
            trace_context=TraceContext.of(context.invocation_metadata()),
            tenant=tenant,
        ) as started:
            answers += [EngineAnswer(index, answer, request.stream, asked) for index, answer in enumerate(started)]
            async for index, chunk in Choices(started, num_prompts=1).chunks():
                for message in answers[index].add(chunk):
                    await write_within(context, message, self._send_timeout_s)

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        tenant = _tenant()
        for request_id in request.request_ids:
            self._running.abort((tenant.name, request_id))
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        problem = self._core.problem
        if not problem and self._model not in self._core.catalog.ready:
            problem = f"{self._model} is not ready"
        return vllm.HealthCheckResponse(healthy=not problem, message=problem)

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        """Raises Unavailable, UnknownModel or PermissionDenied."""
        check_model(_tenant(), self._model)
        model = await self._core.catalog.get(self._model)
        tokenizer = model.tokenizer
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            is_generation=True,
            max_context_length=model.max_context_len,
            max_req_input_len=model.max_context_len - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            bos_token_id=tokenizer.special_id("bos_token") or 0,
            pad_token_id=tokenizer.special_id("pad_token") or 0,
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        admission = self._core.admission
        return vllm.GetServerInfoResponse(
            active_requests=admission.running,
            is_paused=admission.leaving,
            last_receive_timestamp=self._last_received_s,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="outrider",
            data_parallel_size=1,
            max_num_seqs=admission.max_running,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        """The load from this gateway's own requests only; targets serve other gateways too."""
        admission = self._core.admission
        load = vllm.SchedulerLoad(
            num_running_reqs=admission.running,
            num_total_reqs=admission.running,
            max_running_requests=admission.max_running,
        )
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=package_version(), dp_rank_count=1, loads=[load]
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """Raises Unavailable, UnknownModel or PermissionDenied."""
        check_model(_tenant(), self._model)
        model = await self._core.catalog.get(self._model)
        data = await asyncio.to_thread(zipped, model.tokenizer)
        for start in range(0, len(data), _CHUNK_BYTES):
            is_last = start + _CHUNK_BYTES >= len(data)
            sha256 = hashlib.sha256(data).hexdigest() if is_last else ""
            await context.write(common.GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES], sha256=sha256))

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        raise NotSupported("Embed", "only text is generated here")

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        raise NotSupported("FlushCache", "targets serve other gateways too, and keep their caches")

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> common.ProfileResponse:
        raise NotSupported("StartProfile", "there is no profiler at a gateway")

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> common.ProfileResponse:
        raise NotSupported("StopProfile", "there is no profiler at a gateway")

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        raise NotSupported("SubscribeKvEvents", "routers place requests by prefixes themselves")


def _tenant() -> tenants_pb2.Tenant:
    return current_caller().tenant or default_tenant()


def zipped(tokenizer: ModelTokenizer) -> bytes:
    """tokenizer.json, tokenizer_config.json with the chat templates, and generation_config.json with the EOS tokens."""
    templates = tokenizer.template.sources
    template = (
        templates.get("default")
        if len(templates) < 2
        else [{"name": name, "template": text} for name, text in templates.items()]
    )
    files = {
        "tokenizer.json": tokenizer.tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.template.variables}
            | ({"chat_template": template} if template else {})
        ),
        "generation_config.json": json.dumps({"eos_token_id": list(tokenizer.eos_token_ids)}),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in files.items():
            # A fixed date, so that equal files have equal hashes.
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    return archive.getvalue()
