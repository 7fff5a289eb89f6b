"""Sums by tenant, and what becomes of them while the ledger takes none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from outrider.metadata.tenants.ledger import SourceSums, TenantUsage
from outrider.protocol.rounds import Round
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.router.observe import usage
from outrider_controller.router.observe.usage import OTHERS, Account, LedgerWriter, UsageSums

from tests.unit.router.made_requests import a_request

COMMIT = sequence.Commit(
    base_len=10,
    token_ids=[1, 2, 3],
    num_drafted=4,
    num_verified=3,
    num_accepted=2,
    num_branch_tokens=1,
    num_cached_tokens=8,
    share_us=1000,
    drafted_us=500,
    wasted_us=300,
    draft_stats=sequence.DraftStats(share_us=500, useful_us=200),
)
NOW_US = 3600 * 10**6
SOURCES = {"other": SourceSums(4, 3, 2, 400, 500)}


def account(tenant: str) -> Account:
    """Of a sequence that was opened an hour ago."""
    return Account(tenant, "target-1", 0)


class FakeLedger:
    """Keeps what it is given, while it is there."""

    def __init__(self) -> None:
        self.here = True
        self.kept: dict[tuple[int, str], TenantUsage] = {}
        self.num_written = 0

    async def write(self, hour: int, writer: str, sums: Mapping[str, TenantUsage]) -> bool:
        if self.here:
            self.num_written += len(sums)
            self.kept.update({(hour, tenant): replace(each) for tenant, each in sums.items()})
        return self.here


class World:
    def __init__(self) -> None:
        self.sums, self.ledger, self.now_s = UsageSums(), FakeLedger(), 7200.0
        self.writer = LedgerWriter(self.sums, self.ledger, "router-1", lambda: self.now_s)

    def use(self, tenant: str = "a", **changes: int) -> None:
        commit = sequence.Commit()
        commit.CopyFrom(COMMIT)
        for name, value in changes.items():
            setattr(commit, name, value)
        self.sums.round(account(tenant), commit, Round.from_commit(commit, 2000), NOW_US)

    def total(self, tenant: str = "a") -> int:
        return sum(each.output_tokens for (_, name), each in self.ledger.kept.items() if name == tenant)


def test_a_round_is_added_to_its_tenants_bill() -> None:
    sums = UsageSums()
    sums.round(account("a"), COMMIT, Round.from_commit(COMMIT, 2000), NOW_US, a_request(prompt=(1,) * 10))
    assert sums.sums == {"a": TenantUsage(1, 10, 8, 3, 5, 4, 2, 700, 300, 200, 300, SOURCES)}
    sums.round(account("a"), COMMIT, Round.from_commit(COMMIT, 2000), NOW_US, a_request(prompt=(1,) * 9))
    assert (sums.sums["a"].requests, sums.sums["a"].prompt_tokens, sums.sums["a"].output_tokens) == (1, 10, 6)


def test_resumed_tokens_of_the_client_are_billed_as_prompt_and_those_of_an_earlier_call_are_not() -> None:
    sums, resume = UsageSums(), (5, 6)
    asked = a_request(prompt=(1,) * 8, committed=resume, num_resumed_by_client=2, billed=10)
    sums.round(account("a"), COMMIT, Round.from_commit(COMMIT, 2000), NOW_US, asked)
    assert (sums.sums["a"].requests, sums.sums["a"].prompt_tokens) == (1, 10)
    failed_over = a_request(prompt=(1,) * 8, committed=resume, billed=8)
    sums.round(account("a"), COMMIT, Round.from_commit(COMMIT, 2000), NOW_US, failed_over)
    assert (sums.sums["a"].requests, sums.sums["a"].prompt_tokens) == (1, 10)


def test_a_prompt_that_another_answer_pays_for_is_not_billed_again() -> None:
    sums = UsageSums()
    sums.round(account("a"), COMMIT, Round.from_commit(COMMIT, 2000), NOW_US, a_request(prompt=(1,) * 10, billed=0))
    assert sums.sums["a"] == TenantUsage(
        1, 0, 0, 3, 5, 4, 2, 700, 300, 200, 300, {"other": SourceSums(4, 3, 2, 400, 500)}
    )


def test_a_target_is_not_believed_that_a_sequence_took_more_than_its_steps() -> None:
    world = World()
    world.use(share_us=4_000_000_000, wasted_us=4_000_000_000, num_branch_tokens=1 << 30)
    used = world.sums.sums["a"]
    assert (used.target_useful_us, used.target_wasted_us, used.drafted_tokens) == (0, 2002, 4 + 256)


def test_each_source_of_drafts_is_billed_by_its_name_with_the_time_of_its_rows_and_of_its_drafts() -> None:
    sums, commit = UsageSums(), sequence.Commit(token_ids=[1, 2, 3], num_drafted=4, num_verified=3, num_accepted=2)
    commit.share_us, commit.drafted_us, commit.draft_stats.source, commit.draft_stats.share_us = 900, 800, "model", 70
    commit.sources.add(source="model", num_drafted=1, num_verified=1)
    commit.sources.add(source="ngram", own=True, num_drafted=2, num_verified=1, num_accepted=1, draft_us=3)
    commit.sources.add(source="suffix", own=True, num_drafted=1, num_verified=1, num_accepted=1)
    sums.round(account("a"), commit, Round.from_commit(commit, 2000), NOW_US)
    used = sums.sums["a"]
    assert used.sources == {"model": (1, 1, 0, 200, 70), "ngram": (2, 1, 1, 400, 3), "suffix": (1, 1, 1, 200, 0)}
    assert used.drafted_tokens == sum(one.drafted_tokens for one in used.sources.values())
    assert (used.draft_useful_us, used.draft_wasted_us) == (0, 70)
    sums.round(account("a"), commit, Round.from_commit(commit, 2000), NOW_US)
    assert used.sources["ngram"] == (4, 2, 2, 800, 6)


def test_the_time_of_a_source_is_no_longer_than_the_sequences_share_and_a_late_draft_is_billed_to_its_kind() -> None:
    sums, commit = UsageSums(), sequence.Commit(token_ids=[1], num_drafted=1, share_us=900, drafted_us=1 << 31)
    commit.draft_stats.source = "eagle3"
    sums.round(account("a"), commit, Round.from_commit(commit, 2000), NOW_US)
    late = sequence.Commit(token_ids=[1], draft_stats=sequence.DraftStats(source="eagle3", share_us=40))
    sums.round(account("a"), late, Round.from_commit(late, 2000), NOW_US)
    assert sums.sums["a"].sources == {"eagle3": (1, 0, 0, 900, 40)}


def test_what_a_target_says_of_sources_is_bounded() -> None:
    sums, commit = UsageSums(), sequence.Commit(token_ids=[1, 2, 3], num_drafted=4, num_verified=3, num_accepted=2)
    for number in range(40):
        commit.sources.add(source=f"odd {number}", num_drafted=1 << 30, num_verified=1 << 30, num_accepted=1 << 30)
    sums.round(account("late"), commit, Round.from_commit(commit, 2000), NOW_US)
    found = sums.sums["late"].sources
    assert (
        len(found) == 17
        and found["odd 1"] == (256, 256, 2, 0, 0)
        and found["other"][:3] == (24 * 256, 24 * 256, 24 * 2)
    )


def test_what_workers_spent_on_a_sequence_after_its_last_commit_is_billed_too() -> None:
    sums = UsageSums()
    sums.ended(account("a"), sequence.SequenceUsage(share_us=40, draft_share_us=7), NOW_US)
    assert sums.sums["a"] == TenantUsage(target_useful_us=40, draft_wasted_us=7)


def test_a_worker_is_not_believed_more_time_than_has_passed_since_the_opening_however_often_it_says_so() -> None:
    sums, opened = UsageSums(), Account("a", "target-1", opened_us=NOW_US - 5_000_000)
    lie = sequence.Commit(token_ids=[1], share_us=2**32 - 1, queue_us=2**32 - 1)
    lie.draft_stats.share_us = lie.draft_stats.useful_us = 2**32 - 1
    for _ in range(100):
        sums.round(opened, lie, Round.from_commit(lie, 3_600_000_000), NOW_US)
        sums.ended(opened, sequence.SequenceUsage(share_us=2**32 - 1, draft_share_us=2**32 - 1), NOW_US)
    used = sums.sums["a"]
    assert used.target_useful_us + used.target_wasted_us <= 6_000_000
    assert used.draft_useful_us + used.draft_wasted_us <= 6_000_000


def test_after_the_end_of_a_sequence_only_the_tokens_that_it_had_left_may_come() -> None:
    ended = Account("a", "target-1", 0, tokens_left=5, closed_us=2_000_000)
    assert [ended.late(3), ended.late(2), ended.late(1), ended.late(0)] == [True, True, False, False]
    assert ended.target_time(10**9, NOW_US) == 3_000_000 and ended.target_time(10**9, NOW_US) == 0


async def test_only_tenants_that_used_something_since_are_written_again() -> None:
    world = World()
    world.use("a")
    world.use("b")
    await world.writer.flush()
    world.use("a")
    await world.writer.flush()
    await world.writer.flush()
    assert world.ledger.num_written == 3
    assert (world.total("a"), world.total("b")) == (6, 3)


async def test_what_a_store_has_lost_is_written_again_at_the_end_at_the_latest() -> None:
    world = World()
    async with world.writer.running():
        world.use("busy")
        world.use("idle")
        await world.writer.flush()
        world.ledger.kept.clear()
        world.use("busy")
    assert (world.total("busy"), world.total("idle")) == (6, 3)


async def test_sums_wait_while_the_ledger_is_away_and_lose_nothing_over_the_hour() -> None:
    world = World()
    world.use()
    world.ledger.here = False
    await world.writer.flush()
    world.use()
    world.now_s += 3600
    await world.writer.flush()
    world.use()
    await world.writer.flush()
    assert world.total() == 0
    world.ledger.here = True
    await world.writer.flush()
    assert {hour: each.output_tokens for (hour, _), each in world.ledger.kept.items()} == {2: 6, 3: 3}
    await world.writer.flush()
    assert world.ledger.num_written == 2


async def test_a_clock_that_is_set_back_takes_nothing_from_an_hour_that_was_written() -> None:
    world = World()
    for step_s in (3600, -3600, 3600):
        world.use()
        world.now_s += step_s
        await world.writer.flush()
    world.use()
    await world.writer.flush()
    assert world.total() == 12


async def test_what_waits_is_bounded_in_hours(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.ledger.here = False
    for _ in range(30):
        world.use()
        world.now_s += 3600
        await world.writer.flush()
    world.ledger.here = True
    await world.writer.flush()
    assert sorted(hour for hour, _ in world.ledger.kept) == list(range(8, 32))
    assert "usage of 1 tenants" in caplog.text


def test_tenants_beyond_the_most_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_TENANTS", 2)
    world = World()
    for tenant in ("a", "b", "c", "d", "a"):
        world.use(tenant)
    assert {tenant: each.output_tokens for tenant, each in world.sums.sums.items()} == {"a": 6, "b": 3, OTHERS: 6}


async def test_the_last_sums_are_written_as_the_router_ends() -> None:
    world = World()
    async with world.writer.running():
        world.use()
    assert world.total() == 3
