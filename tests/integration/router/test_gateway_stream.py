"""Many calls on one gateway's stream: each lives and ends by itself, and what one step says is one message."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from outrider.errors import Code
from outrider.protocol.errors import from_route_error
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence

from tests.fakes import FakeTarget, continuation
from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import Fleet


@dataclass
class OpenStream:
    """A gateway, so far as the router can tell."""

    call: Any
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    phases: dict[int, list[router.RoutePhase.ValueType]] = field(default_factory=lambda: defaultdict(list))
    finished: set[int] = field(default_factory=set)
    errors: dict[int, router.RouteError] = field(default_factory=dict)
    num_messages: int = 0

    async def ask(self, *calls: tuple[int, router.RouteRequest], timeout_us: int = 0) -> None:
        made = [router.RouteCall(call_id=i, request=request, timeout_us=timeout_us) for i, request in calls]
        await self.call.write(router.RouteManyRequest(calls=made))

    async def read(self) -> bool:
        """One message; False at the end of the stream."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.num_messages += 1
        for response in message.responses:
            if response.phase:
                assert not self.tokens[response.call_id] and not response.token_ids
                self.phases[response.call_id].append(response.phase)
            self.tokens[response.call_id].extend(response.token_ids)
            if response.finish_reason:
                self.finished.add(response.call_id)
        self.errors.update({error.call_id: error for error in message.errors})
        return True

    async def until_ended(self, *call_ids: int) -> None:
        async with asyncio.timeout(60):
            while not set(call_ids) <= self.finished | self.errors.keys():
                assert await self.read()


@asynccontextmanager
async def gateway_stream(fleet: Any) -> AsyncIterator[OpenStream]:
    call = fleet.stub.RouteMany()
    try:
        yield OpenStream(call)
    finally:
        call.cancel()


async def test_calls_on_one_stream_each_get_their_own_text_in_few_messages(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.02))
    draft = await fleet.draft()
    await fleet.start()
    prompts = {i: (i, i + 1, 7) for i in range(1, 21)}
    async with gateway_stream(fleet) as stream:
        await stream.ask(*((i, fleet.request(prompt, 30)) for i, prompt in prompts.items()))
        await stream.until_ended(*prompts)
    assert stream.tokens == {i: continuation(prompt, 30, 1000) for i, prompt in prompts.items()}
    # Twenty sequences would be some two hundred messages one by one; a step of all is one, in either direction.
    assert stream.num_messages < 60
    assert draft.num_messages < 80


async def test_a_gateway_is_told_when_a_call_is_accepted_and_when_a_target_was_sent_it(fleet: Fleet) -> None:
    await fleet.target()
    await fleet.start()
    async with gateway_stream(fleet) as stream:
        await stream.ask((1, fleet.request()), (2, fleet.request(model="other")))
        await stream.until_ended(1, 2)
    assert stream.phases == {1: [router.ROUTE_PHASE_ACCEPTED, router.ROUTE_PHASE_OPENED]}


async def test_a_bad_call_fails_by_itself(fleet: Fleet) -> None:
    await fleet.target()
    await fleet.start()
    async with gateway_stream(fleet) as stream:
        await stream.ask((1, fleet.request(prompt_token_ids=[])), (2, fleet.request()))
        await stream.until_ended(1, 2)
        error = from_route_error(stream.errors[1])
        assert error.code is Code.INVALID_ARGUMENT and error.field == "prompt_token_ids"
        assert stream.finished == {2}
    assert fleet.counter("outrider_admission_rejected_total", tenant="t", reason="INVALID_FIELD") == 1


async def test_an_id_in_use_is_refused(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.02))
    await fleet.start()
    async with gateway_stream(fleet) as stream:
        await stream.ask((1, fleet.request()), (1, fleet.request()))
        await stream.until_ended(1)
        assert stream.errors[1].field == "call_id"


async def test_a_cancelled_call_frees_its_sequence_and_leaves_the_others(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(step_s=0.02))
    await fleet.start()
    async with gateway_stream(fleet) as stream:
        await stream.ask((1, fleet.request(max_new_tokens=500)), (2, fleet.request(max_new_tokens=20)))
        await stream.read()
        await stream.call.write(router.RouteManyRequest(cancelled=[1, 77]))
        await stream.until_ended(2)
        await until(lambda: not target.live)
    assert [close.reason for close in target.closes] == [sequence.CLOSE_REASON_CANCELLED]


async def test_all_calls_end_with_the_stream(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(step_s=0.02))
    await fleet.start()
    async with gateway_stream(fleet) as stream:
        await stream.ask(*((i, fleet.request(max_new_tokens=500)) for i in range(5)))
        await until(lambda: len(target.live) == 5)
    await until(lambda: not target.live and not fleet.router.dispatcher.table.requests)
    assert [close.reason for close in target.closes] == 5 * [sequence.CLOSE_REASON_CANCELLED]


async def test_a_calls_time_is_its_own(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(step_s=0.02))
    await fleet.start()
    async with gateway_stream(fleet) as stream:
        await stream.ask((1, fleet.request(max_new_tokens=500)), timeout_us=100_000)
        await stream.until_ended(1)
        assert from_route_error(stream.errors[1]).code is Code.DEADLINE_EXCEEDED
        await until(lambda: not target.live)


async def test_a_draining_router_ends_the_stream_once_it_has_answered(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.02))
    running = await fleet.start()
    async with gateway_stream(fleet) as stream:
        await stream.ask((1, fleet.request(max_new_tokens=10)))
        await stream.read()
        draining = asyncio.ensure_future(running.drain(5))
        await stream.until_ended(1)
        assert stream.finished == {1}
        assert not await stream.read()
        await draining


@pytest.mark.parametrize("speculation", [router.SPECULATION_MODE_OFF, router.SPECULATION_MODE_AUTO])
async def test_a_target_that_dies_is_not_noticed_on_the_stream(
    fleet: Fleet, speculation: router.SpeculationMode.ValueType
) -> None:
    targets = [await fleet.target(FakeTarget(step_s=0.01)) for _ in range(2)]
    await fleet.draft()
    await fleet.start()
    async with gateway_stream(fleet) as stream:
        await stream.ask(*((i, fleet.request((i, 5), 60, speculation=speculation)) for i in range(1, 9)))
        await stream.read()
        await targets[0].kill()
        await stream.until_ended(*range(1, 9))
    assert stream.tokens == {i: continuation((i, 5), 60, 1000) for i in range(1, 9)}


async def test_an_error_of_ours_is_logged_with_whose_request_it_was(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.target(FakeTarget())
    running = await fleet.start()
    # Something that nobody foresaw: no part of the router raises such by itself.
    running.dispatcher.run = None
    async with gateway_stream(fleet) as stream:
        await stream.ask((1, fleet.request(request_id="mine", tenant="acme")))
        await stream.until_ended(1)
    [line] = [one for one in caplog.records if "while a call was answered" in one.message]
    assert (line.request_id, line.tenant) == ("mine", "acme")
    assert from_route_error(stream.errors[1]).code is Code.INTERNAL
