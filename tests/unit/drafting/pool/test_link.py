"""What a link to a draft worker takes for a worker that no longer drafts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from outrider.drafting.pool import DraftVocabulary, PooledSequence, link
from outrider.drafting.source import CloseReason
from outrider.rpc.link import StreamEnded
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode

SPEC = SequenceSpec((1, 2, 3), SamplingParams(temperature=0.0), VerificationMode.GREEDY)


@asynccontextmanager
async def silent(address: str) -> AsyncIterator[Any]:
    await asyncio.sleep(3600)
    yield None


async def test_a_worker_owes_nothing_while_no_drafts_are_wanted_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_MAX_UNANSWERED_S", -1.0)
    listener = link.Listener(lambda link, reply: None, lambda link, why: None, lambda link: None)
    to_draft = link.DraftLink("draft-1", "h:1", silent, listener, ())

    def opened(sequence_id: int, most: int) -> PooledSequence:
        where = to_draft, sequence_id, SequenceKey(1, sequence_id)
        return PooledSequence.open(*where, SPEC, (), Speculation(most), DraftVocabulary(100, 100), 0)

    try:
        opened(1, 0).commit(3, (4,), 0)
        to_draft._silent_s()
        paused, ended = opened(2, 4), opened(3, 4)
        with pytest.raises(StreamEnded, match="answers nothing"):
            to_draft._silent_s()
        paused.limit(Speculation(0))
        with pytest.raises(StreamEnded, match="answers nothing"):
            to_draft._silent_s()
        ended.close(CloseReason.FINISHED)
        to_draft._silent_s()
    finally:
        await to_draft.stop()
