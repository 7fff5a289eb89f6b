"""Whose turn it is where a pool is nearly full."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from outrider_controller.router.admission.fair_queue import FairQueue, Room, Ticket
from outrider_controller.router.tuning import ACTIVE_S


@dataclass(slots=True)
class Pool:
    """Places, a queue before them, and a clock."""

    places: int
    routers: int = 1
    tokens: float = math.inf
    """Of KV caches."""
    queue: FairQueue = field(default_factory=FairQueue)
    now_s: float = 0.0
    running: list[Ticket] = field(default_factory=list)

    def ask(self, tenant: str, cost: float = 100, weight: float = 1.0) -> Ticket:
        ticket = Ticket(tenant, weight, cost, self.now_s)
        self.queue.put(ticket, self.now_s)
        self.hand_out()
        return ticket

    def hand_out(self) -> None:
        free, free_tokens = self.places - len(self.running), self.tokens - self.queue.held_tokens
        room = Room(self.places, free, self.places / self.routers, self.tokens, free_tokens)
        self.running += self.queue.take(room, self.now_s)

    def wait_s(self, tenant: str) -> float | None:
        """Of one that is not there yet."""
        return self.queue.wait_s(Ticket(tenant, 1.0, 100, self.now_s))

    def end(self, ticket: Ticket) -> None:
        if ticket in self.running:
            self.running.remove(ticket)
        self.queue.leave(ticket, self.now_s)
        self.hand_out()

    def end_oldest(self, times: int) -> None:
        """Each after a second more."""
        for _ in range(times):
            self.now_s += 1
            self.end(self.running[0])

    def held(self) -> Counter[str]:
        return Counter(ticket.tenant for ticket in self.running)


def test_as_long_as_there_is_room_nobody_waits() -> None:
    pool = Pool(places=10)
    assert all(pool.ask("greedy").admitted_s is not None for _ in range(10))
    assert pool.ask("greedy").admitted_s is None


def test_one_tenant_alone_may_have_every_place() -> None:
    pool = Pool(places=10)
    for _ in range(40):
        pool.ask("only")
    pool.end_oldest(20)
    assert len(pool.running) == 10


def test_the_last_fifth_is_kept_for_tenants_below_their_share() -> None:
    pool = Pool(places=10)
    quiet = pool.ask("quiet")
    for _ in range(30):
        pool.ask("greedy")
    pool.end(quiet)
    assert pool.held() == {"greedy": 8}
    assert pool.ask("quiet").admitted_s is not None
    # A tenant that asks for nothing more is forgotten, and its part is others'.
    pool.end(pool.running[-1])
    pool.now_s += ACTIVE_S
    pool.ask("greedy")
    assert pool.held() == {"greedy": 10}


def test_places_follow_weights_where_all_want_more_than_there_are() -> None:
    pool = Pool(places=30)
    for _ in range(60):
        pool.ask("double", weight=2.0)
        pool.ask("single")
    pool.end_oldest(60)
    assert pool.held()["double"] == pytest.approx(20, abs=1)
    assert pool.held()["single"] == pytest.approx(10, abs=1)


def test_turns_follow_tokens_and_not_requests() -> None:
    """One place, so that shares say nothing: of each tenant the same number of tokens goes through."""
    pool = Pool(places=1)
    tickets = [pool.ask(tenant, cost) for tenant, cost in (("long", 900), ("short", 100)) for _ in range(100)]
    for _ in range(60):
        pool.end(pool.running[0])
    tokens: Counter[str] = Counter()
    for ticket in tickets:
        tokens[ticket.tenant] += int(ticket.cost) if ticket.admitted_s is not None else 0
    assert tokens["long"] == pytest.approx(tokens["short"], abs=1000)


def test_turns_follow_weights() -> None:
    pool = Pool(places=1)
    tickets = [pool.ask(tenant, 100, weight) for tenant, weight in (("a", 3.0), ("b", 1.0)) for _ in range(100)]
    for _ in range(80):
        pool.end(pool.running[0])
    through = Counter(ticket.tenant for ticket in tickets if ticket.admitted_s is not None)
    assert through["a"] == pytest.approx(60, abs=2)


def test_a_newcomer_waits_for_one_place_however_long_another_tenants_queue_is() -> None:
    pool = Pool(places=4)
    for _ in range(500):
        pool.ask("greedy")
    newcomer = pool.ask("new")
    pool.end_oldest(2)
    assert newcomer.admitted_s is not None


def test_who_leaves_the_queue_is_not_admitted_and_holds_nothing() -> None:
    pool = Pool(places=1)
    running, left, last = pool.ask("a"), pool.ask("a"), pool.ask("a")
    pool.end(left)
    pool.end(running)
    assert left.admitted_s is None and last.admitted_s is not None
    pool.end(last)
    assert (pool.queue.num_waiting, pool.queue.num_running) == (0, 0)


def test_two_routers_share_what_tenants_have_shares_of() -> None:
    pool = Pool(places=20, routers=2)
    pool.ask("quiet")
    for _ in range(40):
        pool.ask("greedy")
    # Half of this router's half, and whatever is below four fifths of all.
    assert pool.held()["greedy"] == 15


def test_the_newest_of_whom_most_wait_is_pushed_out() -> None:
    pool = Pool(places=1)
    pool.ask("a")
    waiting = [pool.ask("a"), pool.ask("a"), pool.ask("heavy", weight=4.0), pool.ask("heavy", weight=4.0)]
    assert pool.queue.push_out() is waiting[1]
    assert pool.queue.num_waiting == 3


def test_the_wait_is_what_is_before_it_at_the_rate_at_which_places_become_free() -> None:
    pool = Pool(places=2)
    for _ in range(2):
        pool.ask("a", cost=100)
    assert pool.wait_s("a") is None
    pool.now_s = 10
    for ticket in list(pool.running):
        pool.end(ticket)
    for _ in range(2 + 6):
        waits = pool.ask("a", cost=100)
    # Two places, ten seconds each: one every five seconds.
    assert pool.wait_s("a") == pytest.approx(35)
    # It has none waiting, and half of what becomes free.
    assert pool.wait_s("new") == pytest.approx(10)
    for _ in range(6):
        pool.ask("b", cost=100)
    assert pool.wait_s("a") == pytest.approx(70)
    assert pool.queue.wait_s(waits) == pytest.approx(60)


def test_what_tenants_left_behind_is_forgotten() -> None:
    pool = Pool(places=4)
    for number in range(10_000):
        pool.now_s += 0.01
        pool.end(pool.ask(f"t{number}"))
    assert len(pool.queue._accounts) <= ACTIVE_S / 0.01 + 1
    assert pool.queue._shares._sum == pytest.approx(len(pool.queue._accounts))


def test_kv_caches_that_are_full_are_as_full_as_places_that_are_taken() -> None:
    pool = Pool(places=100, tokens=1000)
    quiet = pool.ask("quiet")
    for _ in range(30):
        pool.ask("greedy")
    pool.end(quiet)
    assert pool.held() == {"greedy": 8}
    assert pool.ask("quiet").admitted_s is not None
    pool.end_oldest(1)
    # That is above its share, which is half.
    assert pool.held() == {"greedy": 7, "quiet": 1}


def test_a_long_prompt_waits_for_room_and_is_not_overtaken_by_short_ones() -> None:
    pool = Pool(places=100, tokens=1000)
    for _ in range(4):
        pool.ask("short", cost=100)
    long = pool.ask("long", cost=700)
    short = [pool.ask("short", cost=100) for _ in range(4)]
    assert (long.admitted_s, short[0].admitted_s) == (None, None)
    pool.end_oldest(1)
    assert long.admitted_s is not None and short[0].admitted_s is None


def test_a_request_that_is_longer_than_all_caches_is_let_in_alone() -> None:
    pool = Pool(places=100, tokens=1000)
    first, giant = pool.ask("t", cost=10), pool.ask("t", cost=5000)
    assert giant.admitted_s is None
    pool.end(first)
    assert giant.admitted_s is not None
    assert pool.ask("t", cost=10).admitted_s is None
