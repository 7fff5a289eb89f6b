"""Draft workers at fixed addresses, with a draft that serves on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from outrider.drafting.pool import Vocabulary
from outrider.drafting.source import CloseReason, DraftLimits, Opening
from outrider.drafting.tree import DraftTree
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.protocol.sequence_key import SequenceKey
from outrider.rpc.channel import create_channel
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import draft_pb2_grpc
from outrider.vllm import fixed_drafts
from outrider.vllm.fixed_drafts import FixedDrafts, Reach

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


@contextlib.asynccontextmanager
async def following(*addresses: str, fingerprint: str = "") -> AsyncIterator[FixedDrafts]:
    made = FixedDrafts(Reach(addresses, Vocabulary(512, 512), create_channel, tokenizer_fingerprint=fingerprint))
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def opening(prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> Opening:
    made: dict[str, Any] = {"limits": DraftLimits(4), "max_new_tokens": 50} | changes
    return Opening(tuple(prompt), SamplingParams(temperature=0.0), VerificationMode.GREEDY, **made)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def proposed(made: FixedDrafts, key: SequenceKey) -> None:
    found: list[object] = []
    await until(lambda: found.extend(tree for k, tree in made.pool.poll() if k == key) or bool(found))
    assert isinstance(found[0], DraftTree)


async def test_what_is_opened_before_a_worker_answers_is_drafted_later() -> None:
    async with drafting() as draft, following(draft.address) as made:
        made.open(SequenceKey(0, 1), opening())
        await proposed(made, SequenceKey(0, 1))
        made.commit(SequenceKey(0, 1), 3, [4])
        made.close(SequenceKey(0, 1), CloseReason.FINISHED)
        assert not made._drafted_by


async def test_a_worker_that_is_lost_is_replaced_by_another() -> None:
    async with contextlib.AsyncExitStack() as stack:
        second = await stack.enter_async_context(drafting())
        async with drafting() as first:
            made = await stack.enter_async_context(following(first.address, second.address))
            await until(lambda: len(made._workers) == 2)
            for number in (1, 2):
                made.open(SequenceKey(0, number), opening())
                await proposed(made, SequenceKey(0, number))
            assert set(made._drafted_by.values()) == {first.address, second.address}
        await until(lambda: set(made._drafted_by.values()) == {second.address})


async def test_ids_that_no_message_can_hold_cost_only_their_own_draft() -> None:
    async with drafting() as draft, following(draft.address) as made:
        made.open(SequenceKey(0, 1), opening(stop_token_ids=frozenset({-1})))
        made.open(SequenceKey(0, 2), opening())
        await proposed(made, SequenceKey(0, 2))
        assert list(made._drafted_by) == [SequenceKey(0, 2)]


async def test_a_draft_with_another_tokenizer_is_not_used() -> None:
    async with drafting() as draft, following(draft.address, fingerprint="another") as made:
        info = await made._info(draft.address)
        info.tokenizer_fingerprint = "its own"
        assert made._problem(info) == "its tokenizer is not the target's"
        info.tokenizer_fingerprint = "another"
        assert made._problem(info) is None
