"""What waits for a worker goes out together, in order, within the size limit."""

from __future__ import annotations

import asyncio

from outrider.protocol.outbox import Outbox
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2


def outbox(max_bytes: int = 1 << 20) -> Outbox[target_pb2.VerifyRequest]:
    return Outbox(target_pb2.VerifyRequest, max_bytes)


async def test_everything_pending_goes_out_in_one_message() -> None:
    box = outbox()
    for i in range(50):
        box.open(sequence.OpenSequence(sequence_id=i))
        box.set_draft(target_pb2.SetDraft(sequence_id=i))
        box.set(sequence.SetSpeculation(sequence_id=i))
    box.close(sequence.CloseSequence(sequence_id=3))
    message = await box.take()
    counts = (len(message.opens), len(message.set_drafts), len(message.settings), len(message.closes))
    assert counts == (50, 50, 50, 1)


async def test_take_waits_until_there_is_something() -> None:
    box = outbox()
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    box.close(sequence.CloseSequence(sequence_id=1))
    assert (await taking).closes[0].sequence_id == 1


async def test_messages_are_split_at_the_limit_and_keep_their_order() -> None:
    box = outbox(max_bytes=1000)
    for i in range(20):
        box.open(sequence.OpenSequence(sequence_id=i + 1, prompt_token_ids=range(100)))
    seen = []
    for _ in range(3):
        message = await box.take()
        assert message.ByteSize() <= 1100
        seen.extend(o.sequence_id for o in message.opens)
    assert seen == sorted(seen) and len(seen) > 20 * 3 // 4


async def test_what_is_pending_is_forgotten_with_its_stream() -> None:
    box = outbox()
    box.close(sequence.CloseSequence(sequence_id=1))
    box.clear()
    box.close(sequence.CloseSequence(sequence_id=2))
    assert [c.sequence_id for c in (await box.take()).closes] == [2]
