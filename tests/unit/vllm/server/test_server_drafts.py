"""The drafts of a server without a router: draft workers at fixed addresses, with one that serves on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from outrider.drafting.source import CloseReason
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.rpc.channel import create_channel
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import draft_pb2_grpc
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.target.requests.events import Event, Offered
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.vllm.server import fixed_drafts
from outrider.vllm.server.fixed_drafts import Reach
from outrider.vllm.server.server_drafts import ServerDrafts
from outrider.worker.events import Opened

from tests.integration.target.test_server import ScriptedDraft


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_drafts, "_LOOK_S", 0.02)


@contextlib.asynccontextmanager
async def drafting(address: str = "127.0.0.1:0") -> AsyncIterator[ScriptedDraft]:
    draft, server = ScriptedDraft(None), create_server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    async with serving(server, address, services=[]) as life:
        draft.address = life.address
        yield draft


class Following(ServerDrafts):
    """Without a router."""

    def __init__(self, *addresses: str, fingerprint: str = "") -> None:
        self.events: list[Event] = []
        limits = Limits(512, 512, 16, 100)
        super().__init__(limits, Reach(addresses, create_channel, (), fingerprint), self.events.extend)

    @property
    def drafted_by(self) -> dict[SequenceKey, str]:
        return {key: address for key, (address, _) in self.fixed._drafted_by.items()}

    def commit(self, key: SequenceKey, base_len: int, tokens: list[int], finish: Finish = Finish.NONE) -> None:
        row = StepRow(sequence=None, key=key, base_len=base_len, token_ids=tokens, finish=finish)
        self.step(TargetReport(commits=[row]))


@contextlib.asynccontextmanager
async def following(*addresses: str, fingerprint: str = "") -> AsyncIterator[Following]:
    made = Following(*addresses, fingerprint=fingerprint)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def opening(prompt: Sequence[int] = (1, 2, 3), stop_token_ids: frozenset[int] = frozenset()) -> SequenceSpec:
    greedy = SamplingParams(temperature=0.0), VerificationMode.GREEDY
    return SequenceSpec(tuple(prompt), *greedy, 50, stop_token_ids, speculation=Speculation(4))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def proposed(made: Following, key: SequenceKey) -> None:
    await until(lambda: any(isinstance(event, Offered) and event.key == key for event in made.events))


async def test_what_is_opened_before_a_worker_answers_is_drafted_later() -> None:
    async with drafting() as draft, following(draft.address) as made:
        made.open(Opened(SequenceKey(0, 1), opening(), 0.0))
        await proposed(made, SequenceKey(0, 1))
        made.commit(SequenceKey(0, 1), 3, [4])
        made.close(SequenceKey(0, 1), CloseReason.CANCELLED)
        assert not made.drafted_by


async def test_a_commit_that_finishes_closes_the_sequence() -> None:
    async with drafting() as draft, following(draft.address) as made:
        made.open(Opened(SequenceKey(0, 1), opening(), 0.0))
        await proposed(made, SequenceKey(0, 1))
        made.commit(SequenceKey(0, 1), 3, [4], Finish.STOP)
        assert not made.drafted_by and not made.pooled._open


async def test_a_worker_that_is_lost_is_replaced_by_another() -> None:
    async with contextlib.AsyncExitStack() as stack:
        second = await stack.enter_async_context(drafting())
        async with drafting() as first:
            made = await stack.enter_async_context(following(first.address, second.address))
            await until(lambda: len(made.fixed.workers) == 2)
            for number in (1, 2):
                made.open(Opened(SequenceKey(0, number), opening(), 0.0))
                await proposed(made, SequenceKey(0, number))
            assert set(made.drafted_by.values()) == {first.address, second.address}
        await until(lambda: set(made.drafted_by.values()) == {second.address})


async def test_ids_that_no_message_can_hold_cost_only_their_own_draft() -> None:
    async with drafting() as draft, following(draft.address) as made:
        made.open(Opened(SequenceKey(0, 1), opening(stop_token_ids=frozenset({-1})), 0.0))
        made.open(Opened(SequenceKey(0, 2), opening(), 0.0))
        await proposed(made, SequenceKey(0, 2))
        assert list(made.drafted_by) == [SequenceKey(0, 2)]


async def test_a_draft_with_another_tokenizer_is_not_used() -> None:
    async with drafting() as draft, following(draft.address, fingerprint="another") as made:
        info = await made.fixed._info(draft.address)
        info.tokenizer_fingerprint = "its own"
        assert made.fixed._problem(info) == "its tokenizer is not the target's"
        info.tokenizer_fingerprint = "another"
        assert made.fixed._problem(info) is None
