"""Servers that take their requests themselves, attached to a router, with a model that is a fake."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from outrider.drafting.lookup.suffix import History, SuffixDrafts
from outrider.drafting.source import CloseReason
from outrider.errors import OutriderError
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.protocol.sequences import opening_for_draft
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import (
    attach_pb2,
    attach_pb2_grpc,
    control_pb2,
    sequence_pb2,
    target_pb2,
    tenants_pb2,
    trace_pb2,
    trace_pb2_grpc,
    worker_pb2,
)
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.target.requests.events import Adjusted, Event, Offered
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Times
from outrider.tree import DraftTree
from outrider.vllm.server.fixed_drafts import Reach
from outrider.vllm.server.router_link import RouterReach
from outrider.vllm.server.server_drafts import ServerDrafts
from outrider.worker.events import Opened
from outrider_controller.router.process import running_router

from tests.fakes import continuation, fake_info, next_token
from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import CONFIG, control_plane
from tests.integration.router.test_plan import OFF, ON

PROMPT = [5, 6, 7]
VOCAB_SIZE = 1000
STEP_S = 0.01
"""A request ends after 4,000 steps: until then a busy machine has done what a test waits for."""


class Server(ServerDrafts):
    """A server whose model says what every fake says."""

    def __init__(self, *routers: str, drafts: tuple[str, ...] = (), cap: int = 4) -> None:
        self.info = fake_info(worker_pb2.WORKER_ROLE_TARGET, attached=True, engine="vllm")
        self.cap = cap
        self.drafted: list[int] = []
        """Drafted tokens of each step."""
        self._events: list[Event] = []
        self._settings: dict[SequenceKey, Speculation] = {}
        self._trees: dict[SequenceKey, Any] = {}
        self._numbers = itertools.count(secrets.randbits(62))
        self.suffixes = SuffixDrafts(History())
        reach = RouterReach(routers, create_channel, (), self.info, lambda: worker_pb2.WorkerLoad(num_running=1))
        limits, drafting = Limits(VOCAB_SIZE, 4096, 16, 1000), Reach(drafts, create_channel)
        super().__init__(limits, drafting, self._events.extend, reach, self.suffixes.erase)

    async def answer(
        self, until: Callable[[], bool], *, tenant: str = "t", request_id: str = "r", finish: Finish = Finish.STOP
    ) -> list[int]:
        """Commits tokens until this holds."""
        tokens, key = list(PROMPT), SequenceKey(0, next(self._numbers))
        greedy = SamplingParams(temperature=0.0), VerificationMode.GREEDY
        opening = SequenceSpec(
            tuple(PROMPT),
            *greedy,
            max_new_tokens=4000,
            speculation=Speculation(self.cap),
            request_id=request_id,
            tenant=tenant,
        )
        announced = opening_for_draft(opening, key.sequence_id, (), opening.speculation.for_draft(0.0))
        self.open(Opened(key, opening, 0.0, tokens), announced)
        while not until():
            await asyncio.sleep(STEP_S)
            self._step(key, tokens, Finish.NONE)
        if finish is Finish.NONE:
            self.close(key, CloseReason.CANCELLED)
        else:
            self._step(key, tokens, finish)
        return tokens[len(PROMPT) :]

    def _step(self, key: SequenceKey, tokens: list[int], finish: Finish) -> None:
        for event in self._events:
            if isinstance(event, Adjusted):
                self._settings[event.key] = event.speculation
            elif isinstance(event, Offered):
                self._trees[event.key] = event.tree
        self._events.clear()
        tree, base_len = self._trees.pop(key, None), len(tokens)
        most = self._settings.get(key, Speculation()).max_draft_tokens
        drafted = list(tree.token_ids[:most]) if tree is not None and tree.base_len == base_len else []
        self.drafted.append(len(drafted))
        num_accepted = 0
        while num_accepted < len(drafted) and drafted[num_accepted] == next_token(tokens, VOCAB_SIZE):
            tokens.append(drafted[num_accepted])
            num_accepted += 1
        tokens.append(next_token(tokens, VOCAB_SIZE))
        num_verified = num_accepted + (num_accepted < len(drafted))
        draft = DraftTree(base_len, tuple(drafted), serial=0 if tree is None else tree.serial)
        committed = StepRow(
            sequence=None, key=key, base_len=base_len, times=Times(share_s=STEP_S), draft=draft, finish=finish
        )
        committed.token_ids, committed.accepted = tokens[base_len:], range(num_accepted)
        committed.num_verified = num_verified
        self.step(TargetReport(commits=[committed], step_us=round(STEP_S * 1e6), batch_sequences=1))

    def latest(self, count: int) -> list[int]:
        return self.drafted[-count:]


class Older(Server):
    """Of a version that does not know erasures."""

    def __init__(self, *routers: str) -> None:
        super().__init__(*routers)
        self.asked = asyncio.Event()

    def _router_message(self, message: target_pb2.VerifyRequest) -> None:
        if message.erasures:
            self.asked.set()
        else:
            super()._router_message(message)


@asynccontextmanager
async def attached(*routers: str, kind: type[Server] = Server, **options: Any) -> AsyncIterator[Server]:
    server = kind(*routers, **options)
    task = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def after(server: Server, steps: int) -> Callable[[], bool]:
    return lambda: len(server.drafted) >= steps


async def lease_of(fleet: Any, server: Server) -> Any:
    async with asyncio.timeout(20):
        while True:
            for record in await fleet.store.workers():
                if record.info.worker_id == server.info.worker_id:
                    return record
            await asyncio.sleep(0.01)


async def trace_of(router: Any, request_id: str) -> list[trace_pb2.RequestTrace]:
    async with create_channel(router.address) as channel:
        asked = trace_pb2.GetTraceRequest(request_id=request_id)
        return list((await trace_pb2_grpc.TraceServiceStub(channel).GetTrace(asked)).traces)


@asynccontextmanager
async def attaching(router: Any, info: worker_pb2.WorkerInfo) -> AsyncIterator[Any]:
    """The call of a server that says what a test writes into it."""
    async with create_channel(router.address) as channel:
        call = attach_pb2_grpc.AttachServiceStub(channel).Attach()
        await call.write(attach_pb2.AttachRequest(info=info))
        yield call


async def test_drafts_trace_and_bill_are_as_with_a_target(fleet: Any) -> None:
    draft = await fleet.draft()
    router = await fleet.start()
    async with attached(router.address) as server:
        record = await lease_of(fleet, server)
        assert (record.info.attached, record.info.engine, record.address) == (True, "vllm", router.address)
        tokens = await server.answer(lambda: sum(server.drafted) > 40)
        assert tokens == continuation(PROMPT, len(tokens), VOCAB_SIZE)
        await until(lambda: not router.dispatcher.table.requests)
        (trace,) = await trace_of(router, "r")
        assert (trace.tenant, trace.model, trace.output_tokens) == ("t", "simulated", len(tokens))
        assert trace.finish_reason and not trace.error
        assert trace.metrics.num_draft_tokens == sum(server.drafted) >= trace.metrics.num_accepted_draft_tokens > 0
        assert {event.worker_id for event in trace.events} == {server.info.worker_id, draft.info.worker_id}
        assert not router.dispatcher.usage.sums, "no gateway has admitted anything of any tenant"
        bill = router.dispatcher.attached_usage.sums[f"t {server.info.worker_id}"]
        assert (bill.requests, bill.prompt_tokens, bill.output_tokens) == (1, len(PROMPT), len(tokens))
        assert bill.drafted_tokens == sum(server.drafted) and bill.target_useful_us > 0
    await until(lambda: not router.dispatcher.fleet.attached)


async def test_settings_of_operators_hold_for_running_requests(fleet: Any) -> None:
    await fleet.draft()
    router = await fleet.start()
    async with control_plane(fleet) as control, attached(router.address) as server:
        await until(lambda: router.dispatcher.policy.led)
        ended = asyncio.Event()
        answering = asyncio.create_task(server.answer(ended.is_set))
        ask = control_pb2.SetSpeculationRequest
        await control.SetSpeculation(ask(tenant="t", setting=ON))
        await until(lambda: max(server.latest(20), default=0) > 2)
        await control.SetSpeculation(ask(tenant="t", setting=ON, max_draft_tokens=2))
        await until(lambda: 0 < max(server.latest(20)) <= 2)
        await control.SetSpeculation(ask(tenant="t", setting=OFF))
        await until(lambda: not any(server.latest(20)))
        explained = await control.Explain(control_pb2.ExplainRequest(tenant="t"))
        found = {one.target: one.override.setting for one in explained.decisions}
        assert found["simulated"] == tenants_pb2.SPECULATION_SETTING_OFF
        ended.set()
        assert await answering


async def test_what_a_server_has_learnt_of_a_tenant_is_erased_through_its_router(fleet: Any) -> None:
    router = await fleet.start()
    async with control_plane(fleet) as control, attached(router.address) as server:
        await lease_of(fleet, server)
        history, text = server.suffixes.history, list(range(50))
        for tenant in ("t", "other"):
            history.add(tenant.encode(), text, tenant)
        samples = await control.DeleteHistory(control_pb2.DeleteHistoryRequest(tenant="t", samples=True))
        assert (samples.num_texts, list(samples.unreachable_targets)) == (0, [])
        assert history.find(b"t", text[:20], 4)[0] == text[20:24]
        for left in (1, 0):
            erased = await control.DeleteHistory(control_pb2.DeleteHistoryRequest(tenant="t"))
            assert (erased.num_texts, list(erased.unreachable_targets)) == (left, [])
        assert history.find(b"t", text[:20], 4) == ([], 0)
        assert history.find(b"other", text[:20], 4)[0] == text[20:24]


async def test_a_server_that_goes_before_it_has_erased_is_named(fleet: Any) -> None:
    router = await fleet.start()
    async with control_plane(fleet) as control:
        async with attached(router.address, kind=Older) as server:
            assert isinstance(server, Older)
            await lease_of(fleet, server)
            erasing = asyncio.ensure_future(control.DeleteHistory(control_pb2.DeleteHistoryRequest(tenant="t")))
            async with asyncio.timeout(20):
                await server.asked.wait()
        assert list((await erasing).unreachable_targets) == [server.info.worker_id]


async def test_who_lies_with_a_targets_token_adds_nothing_to_the_bill_of_a_tenant(fleet: Any) -> None:
    """It announces requests of a quiet tenant, and says that it has served what another target serves."""
    router = await fleet.start()
    honest = await fleet.target()
    await until(lambda: bool(router.dispatcher.fleet.live_targets("simulated")))
    await fleet.ask(fleet.request(tenant="quiet", max_new_tokens=8))
    [before] = [replace(one) for one in router.dispatcher.usage.sums.values()]
    known = [*router.dispatcher.table._closed]
    async with attaching(router, fake_info(worker_pb2.WORKER_ROLE_TARGET, worker_id="target-liar")) as call:
        await call.initial_metadata()
        opens = [
            sequence_pb2.OpenSequence(
                sequence_id=number,
                prompt_token_ids=[5] * 3000,
                sampling=sequence_pb2.Sampling(top_p=1),
                stopping=sequence_pb2.Stopping(max_new_tokens=1000),
                mode=sequence_pb2.VERIFICATION_MODE_GREEDY,
                tenant="quiet",
            )
            for number in range(1, 41)
        ]
        lies = [sequence_pb2.Commit(sequence_id=o.sequence_id, base_len=3000, token_ids=[7] * 900) for o in opens]
        lies += [sequence_pb2.Commit(sequence_id=number, base_len=3, token_ids=[7] * 900) for number in known * 20]
        usage = [sequence_pb2.SequenceUsage(sequence_id=number, share_us=2**32 - 1) for number in known * 20]
        step = target_pb2.VerifyResponse(commits=lies, usage=usage, step_us=10**9)
        await call.write(attach_pb2.AttachRequest(opens=opens, step=step))
        await until(lambda: bool(router.dispatcher.attached_usage.sums))
        call.cancel()
    assert router.dispatcher.usage.sums == {"quiet": before}
    [(name, said)] = router.dispatcher.attached_usage.sums.items()
    assert (name, said.output_tokens) == ("quiet target-liar", 40 * 900)
    assert fleet.counter("outrider_attached_tokens_total") == 40 * 900
    assert honest.info.worker_id not in name


async def test_a_server_whose_id_no_lease_can_have_is_refused(fleet: Any) -> None:
    router = await fleet.start()
    for worker_id in ("", "ü"):
        info = fake_info(worker_pb2.WORKER_ROLE_TARGET, worker_id=worker_id, attached=True)
        async with attaching(router, info) as call:
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "worker_id" in await call.details()


async def test_no_more_is_held_of_what_servers_announce_than_there_is_room_for(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await fleet.start()
    table = router.dispatcher.table
    opening = SequenceSpec(tuple(PROMPT), SamplingParams(temperature=0.0), VerificationMode.GREEDY, max_new_tokens=100)
    opens = [opening_for_draft(opening, number, (), Speculation(4).for_draft(0.0)) for number in range(1, 5)]
    for one in opens:
        one.predicted_token_ids.extend([5] * 1000)
        one.logits.repetition_penalty, one.logits.grammar = 1, "start: /a/"

    def commit(number: int, size: int) -> attach_pb2.AttachRequest:
        commits = [sequence_pb2.Commit(sequence_id=number, base_len=len(PROMPT), token_ids=[7] * size)]
        return attach_pb2.AttachRequest(step=target_pb2.VerifyResponse(commits=commits))

    async with attaching(router, fake_info(worker_pb2.WORKER_ROLE_TARGET, attached=True)) as call:
        await call.initial_metadata()
        await call.write(attach_pb2.AttachRequest(opens=opens[:1]))
        await until(lambda: len(table.requests) == 1)
        [first] = table.requests
        assert (first.request.prediction, first.request.logits) == ((), None)
        room = 2 * first.num_bytes + 2000
        monkeypatch.setattr("outrider_controller.router.requests.sequences.MAX_ATTACHED_BYTES", room)
        await call.write(attach_pb2.AttachRequest(opens=opens[1:3]))
        await call.write(commit(1, 1))
        await until(lambda: first.state.committed == [7])
        assert table.by_target.keys() == {1, 2}
        # One that ends makes room, and one that grows beyond it is followed no more.
        close = sequence_pb2.CloseSequence(sequence_id=1)
        await call.write(attach_pb2.AttachRequest(closes=[close]))
        await until(lambda: table.by_target.keys() == {2})
        await call.write(attach_pb2.AttachRequest(opens=opens[3:]))
        await call.write(commit(4, 90))
        await until(lambda: table.by_target.keys() == {2})
        assert 0 < table.attached_bytes < room
        call.cancel()
        await until(lambda: not table.requests)
    assert table.attached_bytes == 0


async def test_a_server_that_is_back_before_the_end_of_its_stream_is_known_is_followed(fleet: Any) -> None:
    router = await fleet.start()
    info = fake_info(worker_pb2.WORKER_ROLE_TARGET, attached=True)
    opening = SequenceSpec(tuple(PROMPT), SamplingParams(temperature=0.0), VerificationMode.GREEDY, max_new_tokens=100)
    opens = [opening_for_draft(opening, 7, (), Speculation(4).for_draft(0.0))]
    calls = []
    async with create_channel(router.address) as channel:
        for _ in range(3):
            calls.append(attach_pb2_grpc.AttachServiceStub(channel).Attach())
            await calls[-1].write(attach_pb2.AttachRequest(info=info))
            await calls[-1].initial_metadata()
            link = router.dispatcher.fleet.attached[info.worker_id]
            await calls[-1].write(attach_pb2.AttachRequest(opens=opens))
            await until(lambda link=link: link.open_sequences == {7})
            for former in calls[:-1]:
                async for _ in former:
                    pass
                assert await former.code() is grpc.StatusCode.OK
            assert info.worker_id in {one.info.worker_id for one in await fleet.store.workers()}
        calls[-1].cancel()
        await until(lambda: not router.dispatcher.fleet.attached and not router.dispatcher.table.requests)


async def test_a_server_outlives_its_router_and_is_attached_to_the_next(fleet: Any) -> None:
    await fleet.draft()
    async with AsyncExitStack() as first:
        router = await first.enter_async_context(running_router(CONFIG, fleet.store))
        port = router.address
        server = await fleet.stack.enter_async_context(attached(port))
        ended = asyncio.Event()
        answering = asyncio.create_task(server.answer(ended.is_set))
        await until(lambda: sum(server.drafted) > 40)
    assert server.router is not None
    await until(lambda: not server.router.attached)
    steps = len(server.drafted)
    # With the settings and the draft that it has.
    await until(lambda: sum(server.drafted[steps:]) > 40)
    again = await fleet.stack.enter_async_context(running_router(replace(CONFIG, listen=port), fleet.store))
    await until(lambda: bool(again.dispatcher.table.requests))
    steps = len(server.drafted)
    await until(lambda: sum(server.drafted[steps:]) > 40)
    ended.set()
    tokens = await answering
    assert tokens == continuation(PROMPT, len(tokens), VOCAB_SIZE)
    await until(lambda: not again.dispatcher.table.requests)
    (trace,) = await trace_of(again, "r")
    assert trace.resumed_tokens + trace.output_tokens == len(tokens) and trace.resumed_tokens > 0
    bill = again.dispatcher.attached_usage.sums[f"t {server.info.worker_id}"]
    assert bill.prompt_tokens == 0, "the first router has billed the prompt"


async def test_without_a_router_drafts_come_from_fixed_addresses(fleet: Any) -> None:
    draft = await fleet.draft()
    async with attached("127.0.0.1:1", drafts=(draft.address,)) as server:
        tokens = await server.answer(lambda: sum(server.drafted) > 40)
        assert tokens == continuation(PROMPT, len(tokens), VOCAB_SIZE)
        # A router's last word on a tenant holds for its next requests.
        server._last["off"] = Speculation()
        steps = len(server.drafted)
        await server.answer(after(server, steps + 50), tenant="off")
        # Nor does that lift the cap of a request.
        server._last["capped"], server.cap = Speculation(4), 0
        await server.answer(after(server, steps + 100), tenant="capped")
        assert not any(server.drafted[steps:])


async def test_a_request_that_a_client_gives_up_ends_at_the_router(fleet: Any) -> None:
    draft = await fleet.draft()
    router = await fleet.start()
    async with attached(router.address) as server:
        await server.answer(lambda: sum(server.drafted) > 4, finish=Finish.NONE)
        await until(lambda: not router.dispatcher.table.requests)
        assert (await trace_of(router, "r"))[0].error == "CANCELLED"
        await until(lambda: not draft.live)


async def test_a_router_refuses_what_is_wrong_and_the_server_goes_on(fleet: Any) -> None:
    await fleet.draft()
    router = await fleet.start()
    async with attached(router.address) as server:
        refused = await server.answer(after(server, 20), tenant="no label\n")
        assert refused and not any(server.drafted) and not router.dispatcher.traces._running
        await server.answer(lambda: sum(server.drafted) > 4)


async def test_no_request_of_a_gateway_is_placed_on_an_attached_server(fleet: Any) -> None:
    router = await fleet.start()
    async with attached(router.address) as server:
        await lease_of(fleet, server)
        await router.dispatcher.fleet.refresh()
        assert not router.dispatcher.fleet.targets and not router.dispatcher.picker.models()
        with pytest.raises(OutriderError):
            await fleet.ask(fleet.request())
        assert not server.drafted


async def test_a_draft_that_dies_is_replaced_by_the_router(fleet: Any) -> None:
    first = await fleet.draft()
    router = await fleet.start()
    async with attached(router.address) as server:
        ended = asyncio.Event()
        answering = asyncio.create_task(server.answer(ended.is_set))
        await until(lambda: sum(server.drafted) > 20)
        second = await fleet.draft()
        await first.kill()
        await until(lambda: bool(second.live))
        steps = len(server.drafted)
        await until(lambda: sum(server.drafted[steps:]) > 20)
        ended.set()
        tokens = await answering
        assert tokens == continuation(PROMPT, len(tokens), VOCAB_SIZE)
