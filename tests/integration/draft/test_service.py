"""DraftService over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from outrider.draft.service import DraftServicer
from outrider.rpc.v1 import draft_pb2
from outrider.rpc.v1 import sequence_pb2 as pb

from .conftest import Serve, until

PROMPT = [20, 21, 22, 23, 24, 20, 21, 22]


def opening(sequence_id: int, prompt: list[int] = PROMPT, **more: Any) -> pb.OpenSequence:
    settings: dict[str, Any] = {
        "sampling": pb.Sampling(temperature=0, top_p=1),
        "mode": pb.VERIFICATION_MODE_GREEDY,
        "stopping": pb.Stopping(max_new_tokens=100),
        "speculation": pb.Speculation(max_draft_tokens=4),
    }
    return pb.OpenSequence(sequence_id=sequence_id, prompt_token_ids=prompt, **{**settings, **more})


def commit(sequence_id: int, base_len: int, *token_ids: int) -> pb.Commit:
    return pb.Commit(sequence_id=sequence_id, base_len=base_len, token_ids=token_ids)


async def read(call: Any) -> draft_pb2.DraftResponse:
    response = await asyncio.wait_for(call.read(), 60)
    assert isinstance(response, draft_pb2.DraftResponse)
    return response


def is_empty(servicer: DraftServicer, num_blocks: int = 64) -> bool:
    return servicer.steps.load.num_running == 0 and servicer.steps.load.num_free_blocks == num_blocks


async def test_it_says_who_it_is(served: Serve) -> None:
    async with served() as (stub, _):
        reply = await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
    info = reply.info
    assert (info.draft_kind, info.vocab_size, info.max_context_len, info.block_size) == ("model", 384, 512, 16)
    assert info.tokenizer_fingerprint
    assert info.worker_id.startswith("draft-")
    assert reply.load.num_free_blocks == 64


async def test_drafts_follow_commits_on_one_stream(served: Serve) -> None:
    async with served() as (stub, servicer):
        call = stub.Draft()
        await call.write(draft_pb2.DraftRequest(opens=[opening(7)]))
        [first] = (await read(call)).drafts
        assert (first.sequence_id, first.base_len, first.epoch, first.source) == (7, 8, 0, "model")
        assert len(first.token_ids) == len(first.confidence) >= 4
        await call.write(draft_pb2.DraftRequest(commits=[commit(7, 8, 23, 24, 99)]))
        [second] = (await read(call)).drafts
        assert (second.base_len, second.epoch, second.source) == (11, 1, "model")
        # Four tokens, and what may come in their place.
        assert second.parents[:4] == [-1, 0, 1, 2]
        assert len(second.token_ids) == len(second.confidence) == len(second.parents) > 4
        assert second.draft_us > 0
        await call.write(draft_pb2.DraftRequest(closes=[pb.CloseSequence(sequence_id=7)]))
        await until(lambda: is_empty(servicer))
        await call.done_writing()


async def test_what_came_in_one_message_is_answered_in_one_message(served: Serve) -> None:
    async with served() as (stub, _):
        call = stub.Draft()
        await call.write(draft_pb2.DraftRequest(opens=[opening(i, [i, i + 1, i + 2]) for i in range(10, 20)]))
        response = await read(call)
        assert [draft.sequence_id for draft in response.drafts] == list(range(10, 20))
        await call.write(draft_pb2.DraftRequest(commits=[commit(i, 3, 5) for i in range(10, 20)]))
        assert [draft.base_len for draft in (await read(call)).drafts] == [4] * 10
        call.cancel()


async def test_in_ratio_mode_drafts_carry_q_and_the_sampling(served: Serve) -> None:
    sampling = pb.Sampling(temperature=0.7, top_p=0.9, seed=5)
    async with served() as (stub, _):
        call = stub.Draft()
        message = opening(1, sampling=sampling, mode=pb.VERIFICATION_MODE_RATIO)
        await call.write(draft_pb2.DraftRequest(opens=[message]))
        [draft] = (await read(call)).drafts
        assert draft.sampling == sampling
        assert len(draft.q) == len(draft.token_ids) == 4
        assert all(sum(q.counts) == 65536 for q in draft.q)
        call.cancel()


async def test_bad_data_ends_its_sequence_and_nothing_else(served: Serve) -> None:
    async with served() as (stub, _):
        call = stub.Draft()
        await call.write(draft_pb2.DraftRequest(opens=[opening(1), opening(2), opening(3, [])]))
        response = await read(call)
        assert [(e.sequence_id, e.field) for e in response.errors] == [(3, "prompt_token_ids")]
        assert [draft.sequence_id for draft in response.drafts] == [1, 2]
        bad = [commit(1, 700, 23), commit(2, 8, 23), commit(99, 3, 1)]
        await call.write(draft_pb2.DraftRequest(commits=bad))
        response = await read(call)
        assert [(e.sequence_id, e.reason) for e in response.errors] == [(1, "COMMIT_MISMATCH")]
        assert [draft.sequence_id for draft in response.drafts] == [2]
        call.cancel()


async def test_a_stream_that_ends_or_breaks_gives_everything_back(served: Serve) -> None:
    async with served() as (stub, servicer):
        ended, cancelled, kept = stub.Draft(), stub.Draft(), stub.Draft()
        for call in (ended, cancelled, kept):
            # The same id on each: ids belong to their stream.
            await call.write(draft_pb2.DraftRequest(opens=[opening(1), opening(2)]))
            await read(call)
        assert servicer.steps.load.num_running == 6
        await ended.done_writing()
        cancelled.cancel()
        await until(lambda: servicer.steps.load.num_running == 2)
        await kept.write(draft_pb2.DraftRequest(commits=[commit(1, 8, 23)]))
        assert [draft.base_len for draft in (await read(kept)).drafts] == [9]
        assert await ended.code() == grpc.StatusCode.OK
        kept.cancel()
        await until(lambda: is_empty(servicer))


async def test_a_router_that_stops_reading_and_leaves_is_forgotten_too(served: Serve) -> None:
    async with served() as (stub, servicer):
        call = stub.Draft()
        for i in range(1, 300):
            await call.write(draft_pb2.DraftRequest(opens=[opening(i)], closes=[pb.CloseSequence(sequence_id=i - 1)]))
        await until(lambda: servicer.stats.busy_s > 0)
        call.cancel()
        await until(lambda: is_empty(servicer))


async def test_sequences_of_mixed_lives_all_end_with_every_block_returned(served: Serve) -> None:
    async with served() as (stub, servicer):
        call = stub.Draft()
        lengths = {i: 3 + 5 * (i % 7) for i in range(1, 33)}
        opens = [opening(i, [(i + j) % 384 for j in range(n)]) for i, n in lengths.items()]
        await call.write(draft_pb2.DraftRequest(opens=opens))
        left = {i: i % 5 + 1 for i in lengths}
        while left:
            response = await read(call)
            assert not response.errors
            reply = draft_pb2.DraftRequest()
            for draft in response.drafts:
                left[draft.sequence_id] -= 1
                if left[draft.sequence_id]:
                    kept = draft.token_ids[: draft.sequence_id % 4]
                    reply.commits.append(commit(draft.sequence_id, draft.base_len, *kept, 7))
                else:
                    reply.closes.append(pb.CloseSequence(sequence_id=draft.sequence_id))
                    del left[draft.sequence_id]
            await call.write(reply)
        await until(lambda: is_empty(servicer))
        call.cancel()
