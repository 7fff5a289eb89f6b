"""Which drafts a round judged, and what those took: each is charged once, and what is unknown is 0."""

from __future__ import annotations

from typing import Any

from outrider.drafting.pool.sequence import DraftLog, drafted_us
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.tree import DraftTree


def add(log: DraftLog, base_len: int, count: int, now_us: int = 0, **fields: Any) -> int:
    draft = sequence.Draft(base_len=base_len, token_ids=[1] * count, **fields)
    log.number(draft)
    tree = DraftTree(base_len, (1,) * count, source=draft.source, epoch=draft.epoch, serial=draft.serial)
    return log.add(draft, tree, now_us)


def compute_us(log: DraftLog, base_len: int, drafted: int, serial: int, committed_len: int) -> int:
    return drafted_us(log.take_verified(base_len, drafted, serial, committed_len))[1]


def test_the_way_of_an_answer_is_what_the_draft_did_not_have_it_for() -> None:
    log = DraftLog()
    log.asked(11, 1000)
    assert add(log, 11, 3, 1900, draft_us=600, compute_us=500) == 900
    assert drafted_us(log.take_verified(11, 3, 1, 13)) == (600, 500, 300)


def test_a_guess_made_unasked_has_no_way_from_the_commit() -> None:
    log = DraftLog()
    log.asked(11, 1000)
    assert add(log, 12, 1, 1900, draft_us=10) == 0
    assert drafted_us(log.take_verified(12, 1, 1, 14)) == (10, 0, 0)


def test_every_draft_is_charged_to_the_first_round_that_judged_a_part_of_it() -> None:
    log = DraftLog()
    add(log, 10, 3, compute_us=5)
    add(log, 13, 2, compute_us=7)
    add(log, 15, 1, compute_us=9)
    assert compute_us(log, 10, 4, 2, 14) == 12
    assert compute_us(log, 14, 2, 3, 16) == 9
    assert not log.waits


def test_a_guess_that_was_taken_back_is_charged_to_nobody() -> None:
    log = DraftLog()
    add(log, 10, 3, epoch=0, compute_us=5)
    add(log, 10, 3, epoch=1, compute_us=7)
    assert compute_us(log, 10, 2, 2, 12) == 7


def test_what_comes_too_late_for_a_round_is_not_charged_to_it() -> None:
    log = DraftLog()
    add(log, 10, 2, compute_us=5)
    add(log, 11, 3, compute_us=7)
    assert compute_us(log, 10, 2, 1, 12) == 5


def test_a_clock_that_disagrees_gives_no_negative_time() -> None:
    log = DraftLog()
    log.asked(10, 50)
    add(log, 10, 1, 60, draft_us=10**6)
    assert drafted_us(log.take_verified(10, 1, 1, 11)) == (10**6, 0, 0)
