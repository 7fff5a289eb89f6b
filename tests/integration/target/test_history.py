"""`outrider delete history`: every target forgets a tenant's texts, and an operator is told of one that did not
answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from outrider.metadata.store import MetadataStore
from outrider.rpc.access.roles import ClusterSecret, Role, bearer
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, target_pb2_grpc
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control

from tests.integration.target.test_server import BY_TORCH, Router, open_sequence, running_target
from tests.redis_server import EmbeddedServer

PROMPT = list(range(10, 50))
OWN = sp.Speculation(max_own_draft_tokens=4)


async def num_drafted(stub: target_pb2_grpc.TargetServiceAsyncStub, number: int, tenant: str) -> int:
    """A tenant asks once more."""
    router = Router(stub)
    one = open_sequence(number, PROMPT, cache_salt=tenant.encode(), tenant=tenant, speculation=OWN)
    await router.send(opens=[one])
    await router.finished(number)
    await router.call.done_writing()
    return sum(commit.num_drafted for response in router.responses for commit in response.commits)


async def num_cached(stub: target_pb2_grpc.TargetServiceAsyncStub, number: int, tenant: str) -> int:
    """Of the prompt, when the tenant asks once more."""
    router = Router(stub)
    await router.send(opens=[open_sequence(number, PROMPT, cache_salt=tenant.encode(), tenant=tenant)])
    await router.finished(number)
    await router.call.done_writing()
    return sum(commit.num_cached_tokens for response in router.responses for commit in response.commits)


@pytest.fixture
async def stack(tiny: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """Two targets that remember answers, and an operator's stub."""
    secret = ClusterSecret(b"0123456789abcdef")
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedServer.start(tmp_path / "metadata"))
        store = await stack.enter_async_context(MetadataStore.connect(redis.url, call_timeout_s=5.0))
        # A step of the kernels may be so short that no draft pays.
        options: Any = {"engine": BY_TORCH, "lookups": "suffix", "metadata_url": redis.url}
        targets = [await stack.enter_async_context(running_target(tiny, **options)) for _ in range(2)]
        life = await stack.enter_async_context(running_control(ControlConfig(secret=secret), store))
        channel = await stack.enter_async_context(create_channel(life.address))
        yield targets, control_pb2_grpc.ControlServiceStub(channel), bearer(secret.token(Role.OPERATOR))


async def test_after_an_erasure_no_target_drafts_from_what_the_tenant_was_answered(stack: Any) -> None:
    targets, control, operator = stack
    for _, stub in targets:
        for tenant in ("a", "b"):
            assert await num_drafted(stub, 1, tenant) == 0
            assert await num_drafted(stub, 2, tenant) > 0
    request = control_pb2.DeleteHistoryRequest(tenant="a")
    erased = await control.DeleteHistory(request, metadata=operator)
    assert (erased.num_texts, list(erased.unreachable_targets)) == (4, [])
    for _, stub in targets:
        assert await num_drafted(stub, 3, "a") == 0
        assert await num_drafted(stub, 3, "b") > 0
    audit = await control.ListAudit(control_pb2.ListAuditRequest(), metadata=operator)
    assert [(one.action, one.name, one.by) for one in audit.entries] == [("delete history", "a", "operator")]


async def test_a_target_that_does_not_answer_is_named(stack: Any) -> None:
    targets, control, operator = stack
    running, _ = targets[0]
    await running.life.server.stop(None)
    erased = await control.DeleteHistory(control_pb2.DeleteHistoryRequest(tenant="a"), metadata=operator)
    assert list(erased.unreachable_targets) == [running.servicer.info.worker_id]


async def test_after_an_erasure_no_target_has_the_tenants_prefixes_cached(stack: Any) -> None:
    targets, control, operator = stack
    for _, stub in targets:
        assert [await num_cached(stub, number, "a") > 0 for number in range(2)] == [False, True]
    await control.DeleteHistory(control_pb2.DeleteHistoryRequest(tenant="a"), metadata=operator)
    for running, stub in targets:
        assert [await num_cached(stub, number, "a") > 0 for number in range(2, 4)] == [False, True]
        assert running.servicer.load_message().num_running == 0
