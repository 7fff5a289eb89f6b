"""Every internal service with a tiny model behind it, in this process; and what a sound client says to each."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from outrider.draft.config import DraftConfig
from outrider.draft.process import describe
from outrider.draft.process import serve as serve_draft
from outrider.drafters.head import HeadDrafter
from outrider.drafters.loading import load_drafter
from outrider.engine import EngineConfig
from outrider.metadata import MetadataStore
from outrider.rpc.v1 import (
    attach_pb2,
    control_pb2,
    draft_pb2,
    policy_pb2,
    router_pb2,
    sequence_pb2,
    target_pb2,
    trace_pb2,
    worker_pb2,
)
from outrider.runtime.freed import release_memory
from outrider.target.config import TargetConfig
from outrider.target.process import load
from outrider.target.process import serve as serve_target
from outrider.telemetry.logging import configure_logging
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control
from outrider_controller.router.config import FailoverConfig, RouterConfig
from outrider_controller.router.process import running_router

from tests.redis_server import EmbeddedServer
from tests.unit.target.test_head_drafts import random_head

MODEL = "tiny"
BARRIER_ID = 2**63 + 12345
"""Of what is sent last on a stream, and is answered with an error of its own: then all before it was taken up."""

_GREEDY = sequence_pb2.Sampling(temperature=0.0, top_p=1.0)
_STOPPING = sequence_pb2.Stopping(max_new_tokens=4, stop_token_ids=[2])
_SPECULATION = sequence_pb2.Speculation(max_draft_tokens=4, max_wait_us=1000)
_OPEN = sequence_pb2.OpenSequence(
    sequence_id=1,
    prompt_token_ids=[5, 6, 7],
    committed_token_ids=[8],
    sampling=_GREEDY,
    stopping=_STOPPING,
    mode=sequence_pb2.VERIFICATION_MODE_GREEDY,
    speculation=_SPECULATION,
    cache_salt=b"salt",
)
_OPEN_RATIO = sequence_pb2.OpenSequence(
    sequence_id=2,
    prompt_token_ids=[5, 6, 7],
    sampling=sequence_pb2.Sampling(temperature=0.8, top_p=0.95, seed=7),
    stopping=_STOPPING,
    mode=sequence_pb2.VERIFICATION_MODE_RATIO,
    speculation=_SPECULATION,
)
_SETTINGS = [sequence_pb2.SetSpeculation(sequence_id=1, speculation=_SPECULATION)]
_CLOSES = [sequence_pb2.CloseSequence(sequence_id=1, reason=sequence_pb2.CLOSE_REASON_CANCELLED)]
_FEATURES = [
    sequence_pb2.Commit(sequence_id=1, base_len=4, token_ids=[9], features=bytes(128 * 4), features_start=0),
    sequence_pb2.Commit(sequence_id=1, base_len=5, features=b"\x80\x3f" * 64, features_start=4),
]
_COMMITS = [
    sequence_pb2.Commit(sequence_id=1, base_len=4, token_ids=[9, 10], num_drafted=2, num_verified=2, num_accepted=1),
    sequence_pb2.Commit(sequence_id=2, base_len=3, token_ids=[9], rejected_token_ids=[3]),
]
_DRAFT = sequence_pb2.DraftAssignment(address="127.0.0.1:1", worker_id="draft-1", sequence_id=9)
_SET_DRAFT = target_pb2.SetDraft(sequence_id=1, draft=_DRAFT)
_ROUTE = router_pb2.RouteRequest(
    request_id="r1",
    tenant="t",
    model=MODEL,
    prompt_token_ids=[5, 6, 7],
    sampling=_GREEDY,
    stopping=_STOPPING,
    speculation=router_pb2.SPECULATION_MODE_AUTO,
    max_draft_tokens=3,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    tracestate="a=b",
)
_ROUTE_SEEDED = router_pb2.RouteRequest(
    request_id="r2",
    model=MODEL,
    prompt_token_ids=[5, 6],
    resume_token_ids=[7],
    sampling=_OPEN_RATIO.sampling,
    seeded=True,
    stopping=_STOPPING,
)


@dataclass(frozen=True, slots=True)
class Rpc:
    """One call, and sound messages of it."""

    service: str
    method: str
    response: type[Any]
    seeds: tuple[Message, ...]
    barrier: Message | None = None
    """Of a call that takes a stream of requests, and answers this with an error of its own."""
    begins: Message | None = None
    """Of one that answers nothing which it refuses: what it is sent first."""
    at: str = ""
    """Where it is served; empty: as its service."""

    @property
    def streams(self) -> bool:
        return self.barrier is not None or self.begins is not None

    @property
    def runs_model(self) -> bool:
        return self.barrier is not None

    @property
    def place(self) -> str:
        return self.at or self.service

    @property
    def path(self) -> str:
        return f"/outrider.rpc.v1.{self.service}/{self.method}"


RPCS = (
    Rpc(
        "TargetService", "GetInfo", target_pb2.TargetServiceGetInfoResponse, (target_pb2.TargetServiceGetInfoRequest(),)
    ),
    Rpc(
        "TargetService",
        "Verify",
        target_pb2.VerifyResponse,
        (
            target_pb2.VerifyRequest(opens=[_OPEN, _OPEN_RATIO]),
            target_pb2.VerifyRequest(opens=[_OPEN], set_drafts=[_SET_DRAFT]),
            target_pb2.VerifyRequest(settings=_SETTINGS, closes=_CLOSES),
        ),
        target_pb2.VerifyRequest(opens=[sequence_pb2.OpenSequence(sequence_id=BARRIER_ID)]),
    ),
    Rpc("DraftService", "GetInfo", draft_pb2.DraftServiceGetInfoResponse, (draft_pb2.DraftServiceGetInfoRequest(),)),
    Rpc(
        "DraftService",
        "Draft",
        draft_pb2.DraftResponse,
        (
            draft_pb2.DraftRequest(opens=[_OPEN, _OPEN_RATIO]),
            draft_pb2.DraftRequest(opens=[_OPEN], commits=_COMMITS, settings=_SETTINGS),
            draft_pb2.DraftRequest(commits=_COMMITS, closes=_CLOSES),
        ),
        draft_pb2.DraftRequest(opens=[sequence_pb2.OpenSequence(sequence_id=BARRIER_ID)]),
    ),
    Rpc("RouterService", "ListModels", router_pb2.ListModelsResponse, (router_pb2.ListModelsRequest(),)),
    Rpc(
        "RouterService",
        "RouteMany",
        router_pb2.RouteManyResponse,
        (
            router_pb2.RouteManyRequest(calls=[router_pb2.RouteCall(call_id=1, request=_ROUTE, timeout_us=10**6)]),
            router_pb2.RouteManyRequest(
                calls=[router_pb2.RouteCall(call_id=2, request=_ROUTE_SEEDED)], cancelled=[1, 77]
            ),
        ),
        router_pb2.RouteManyRequest(calls=[router_pb2.RouteCall(call_id=BARRIER_ID)]),
    ),
    Rpc(
        "TraceService",
        "GetActivity",
        trace_pb2.GetActivityResponse,
        (trace_pb2.GetActivityRequest(max_sequences=9, tenant="t"), trace_pb2.GetActivityRequest(max_sequences=10_001)),
    ),
    Rpc("TraceService", "GetTrace", trace_pb2.GetTraceResponse, (trace_pb2.GetTraceRequest(request_id="r1"),)),
    Rpc(
        "ControlService",
        "ListWorkers",
        control_pb2.ListWorkersResponse,
        (control_pb2.ListWorkersRequest(role=worker_pb2.WORKER_ROLE_TARGET),),
    ),
    Rpc(
        "ControlService",
        "ListSequences",
        control_pb2.ListSequencesResponse,
        (control_pb2.ListSequencesRequest(limit=9, tenant="t"), control_pb2.ListSequencesRequest(limit=10_001)),
    ),
)

_HEAD_DRAFT = replace(
    next(rpc for rpc in RPCS if rpc.method == "Draft"),
    seeds=(
        draft_pb2.DraftRequest(opens=[_OPEN, _OPEN_RATIO]),
        draft_pb2.DraftRequest(opens=[_OPEN], commits=[*_FEATURES, *_COMMITS], settings=_SETTINGS),
        draft_pb2.DraftRequest(commits=_FEATURES, closes=_CLOSES),
    ),
    at="HeadDraftService",
)
_INFO = worker_pb2.WorkerInfo(
    protocol_version=1,
    role=worker_pb2.WORKER_ROLE_TARGET,
    worker_id="target-attached",
    model="attached",
    vocab_size=384,
    max_context_len=512,
    tenant_draft_tokens={"t": 3},
)
_LOAD = worker_pb2.WorkerLoad(num_running=1, gpu=worker_pb2.GpuLoad(utilization=0.5))
_STEP = target_pb2.VerifyResponse(
    commits=_COMMITS,
    step_us=1000,
    errors=[sequence_pb2.SequenceError(sequence_id=1, code=3, reason="X")],
    usage=[sequence_pb2.SequenceUsage(sequence_id=1, share_us=5)],
    row_price=0.1,
    best_chance=0.9,
)
_ATTACH = Rpc(
    "AttachService",
    "Attach",
    target_pb2.VerifyRequest,
    (
        attach_pb2.AttachRequest(info=_INFO, load=_LOAD),
        attach_pb2.AttachRequest(opens=[_OPEN, _OPEN_RATIO], step=_STEP),
        attach_pb2.AttachRequest(step=_STEP, closes=_CLOSES, erased=[target_pb2.EraseHistoryResponse(num_texts=1)]),
    ),
    begins=attach_pb2.AttachRequest(info=_INFO, load=_LOAD),
)
_EVIDENCE = policy_pb2.DraftEvidence(
    tenant="t", target=MODEL, draft="d@r/model", rounds=10, tokens=20, saved=5, verified=20, accepted=10, draft_us=9
)
_REPORT = policy_pb2.TargetReport(model=MODEL, drafts=["d@r/model"], row_price=0.1, best_chance=0.9)
_FOLLOW = policy_pb2.FollowRequest(
    router_id="router-1", evidence=[_EVIDENCE], targets=[_REPORT], busy=0.5, reaches_store=True
)
_POLICY = Rpc("PolicyService", "Follow", policy_pb2.FollowResponse, (_FOLLOW,), begins=_FOLLOW)


def _unary(service: Any, *but: str) -> Iterator[Rpc]:
    """All calls of a service that take one message, with an empty one, and one with each text set."""
    for method in service.methods:
        if method.name in but or method.client_streaming:
            continue
        kind, response = (GetMessageClass(of) for of in (method.input_type, method.output_type))
        full = kind()
        for field in kind.DESCRIPTOR.fields:
            if field.type == field.TYPE_STRING and not field.is_repeated:
                setattr(full, field.name, "t")
        yield Rpc(service.name, method.name, response, (kind(), full))


_KNOWN = {rpc.path for rpc in RPCS}
_MORE = [
    rpc
    for module in (target_pb2, router_pb2, trace_pb2, attach_pb2, control_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    # It does not end by itself, or would refuse what others here do.
    for rpc in _unary(service, "WatchEvents", "CreateKey", "PutTenants")
    if rpc.path not in _KNOWN
]
ALL = (*RPCS, _HEAD_DRAFT, _ATTACH, _POLICY, *_MORE)
"""Also those whose every message is taken, or whose every message is refused."""

ENGINE = EngineConfig(dtype="float32", num_blocks=256)


@asynccontextmanager
async def serving_all(directory: Path) -> AsyncIterator[Mapping[str, str]]:
    """Addresses by service, until the block is left."""
    tiny = tiny_checkpoint(directory / "tiny")
    with EmbeddedServer.start(directory / "redis") as redis:
        async with AsyncExitStack() as stack:
            common: dict[str, Any] = {"model": str(tiny), "listen": "127.0.0.1:0", "engine": ENGINE}
            target_config = TargetConfig(**common, model_name=MODEL, metadata_url=redis.url)
            target = await stack.enter_async_context(serve_target(target_config, *load(target_config)))
            draft_config = DraftConfig(**common, metadata_url=redis.url)
            drafter = load_drafter(tiny, engine=ENGINE, model=draft_config.drafting)
            info = describe(draft_config, tiny, drafter)
            draft = await stack.enter_async_context(serve_draft(draft_config, drafter, info))
            head = HeadDrafter(random_head("mtp", tiny), 384, 512, 64, "cpu")
            info_of_head = describe(draft_config, tiny, head)
            head_draft = await stack.enter_async_context(serve_draft(draft_config, head, info_of_head))
            store = await stack.enter_async_context(MetadataStore.connect(redis.url))
            config = RouterConfig(failover=FailoverConfig(wait_for_target_s=1.0))
            router = await stack.enter_async_context(running_router(config, store))
            control = await stack.enter_async_context(running_control(ControlConfig(), store))
            yield {
                "TargetService": target.life.address,
                "DraftService": draft.life.address,
                "HeadDraftService": head_draft.life.address,
                "RouterService": router.address,
                "TraceService": router.address,
                "AttachService": router.address,
                "ControlService": control.address,
                "PolicyService": control.address,
            }


async def _serve_until_stopped() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with serving_all(Path(directory)) as addresses:
            print(json.dumps(dict(addresses)), flush=True)
            while await asyncio.to_thread(sys.stdin.readline):
                print(_held_bytes(), flush=True)


def _held_bytes() -> int:
    """Resident, without what is free: cycles, and what the allocator keeps."""
    gc.collect()
    release_memory()
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    configure_logging("services", "human")
    asyncio.run(_serve_until_stopped())
