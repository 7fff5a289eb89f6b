"""What waits for a peer goes out together, in order, within the size limit; one that reads nothing loses its stream."""

from __future__ import annotations

import asyncio

import pytest
from outrider.errors import Overloaded
from outrider.rpc.outbox import BatchingOutbox, Outbox
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2


def outbox(max_bytes: int = 1 << 20) -> BatchingOutbox[target_pb2.VerifyRequest]:
    return BatchingOutbox(target_pb2.VerifyRequest, max_bytes)


def close(box: BatchingOutbox[target_pb2.VerifyRequest], sequence_id: int) -> None:
    closing = sequence.CloseSequence(sequence_id=sequence_id)
    box.last(closing.ByteSize()).closes.append(closing)


async def taken(box: BatchingOutbox[target_pb2.VerifyRequest]) -> target_pb2.VerifyRequest:
    message = await box.take()
    assert message is not None
    return message


async def test_everything_pending_goes_out_in_one_message() -> None:
    box = outbox()
    for i in range(50):
        box.last(10).opens.append(sequence.OpenSequence(sequence_id=i))
        box.last(10).set_drafts.append(target_pb2.SetDraft(sequence_id=i))
        box.last(10).settings.append(sequence.SetSpeculation(sequence_id=i))
    close(box, 3)
    message = await taken(box)
    counts = (len(message.opens), len(message.set_drafts), len(message.settings), len(message.closes))
    assert counts == (50, 50, 50, 1)


async def test_take_waits_until_there_is_something() -> None:
    box = outbox()
    taking = asyncio.create_task(taken(box))
    await asyncio.sleep(0)
    assert not taking.done()
    close(box, 1)
    assert (await taking).closes[0].sequence_id == 1


async def test_messages_are_split_at_the_limit_and_keep_their_order() -> None:
    box = outbox(max_bytes=1000)
    for i in range(20):
        opening = sequence.OpenSequence(sequence_id=i + 1, prompt_token_ids=range(100))
        box.last(opening.ByteSize()).opens.append(opening)
    close(box, 20)
    seen, closed = [], []
    while not closed:
        message = await taken(box)
        assert message.ByteSize() <= 1100
        seen.extend(o.sequence_id for o in message.opens)
        closed.extend(c.sequence_id for c in message.closes)
    assert (seen, closed) == (list(range(1, 21)), [20])


async def test_what_is_larger_than_a_message_may_be_goes_out_alone() -> None:
    box = outbox(max_bytes=10)
    large = sequence.OpenSequence(sequence_id=2, prompt_token_ids=range(100))
    close(box, 1)
    box.last(large.ByteSize()).opens.append(large)
    close(box, 3)
    sizes = [(len(message.opens), len(message.closes)) for message in [await taken(box) for _ in range(3)]]
    assert sizes == [(0, 1), (1, 0), (0, 1)]


async def test_what_is_pending_is_forgotten_with_its_stream() -> None:
    box = outbox()
    close(box, 1)
    box.clear()
    close(box, 2)
    assert [c.sequence_id for c in (await taken(box)).closes] == [2]


async def test_a_peer_that_leaves_too_much_unread_loses_its_stream() -> None:
    box = Outbox[int](max_unread=2)
    ending = asyncio.create_task(box.broken_off())
    for number in range(2):
        box.put(number)
    await asyncio.sleep(0)
    assert not ending.done()
    box.put(2)
    with pytest.raises(Overloaded, match="2 messages are unread"):
        await ending


async def test_the_end_comes_after_what_waits_and_an_outbox_is_idle_once_all_is_written() -> None:
    box = Outbox[int]()
    box.put(1)
    box.end()
    assert await box.take() == 1
    assert not box.idle.is_set(), "it may still be on its way"
    assert await box.take() is None
    assert box.idle.is_set()
