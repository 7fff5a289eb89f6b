"""What one gateway lets in of a quota, on a clock that a test moves."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from outrider.errors import Code, InvalidRequest, Overloaded
from outrider.gateway.tenants import quota_keeper
from outrider.gateway.tenants.quota_keeper import QuotaKeeper
from outrider.gateway.tenants.quotas import Balance, MeanTokens, Rate, TokenBucket
from outrider.metadata.tenants.quota import Granted, QuotaRequest
from outrider.rpc.v1 import tenants_pb2


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Store:
    """One bucket of each quantity, as the script keeps it."""

    clock: Clock
    away: bool = False
    num_takes: int = 0
    levels: dict[str, TokenBucket] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)

    async def take(
        self,
        tenant: str,
        requests: QuotaRequest,
        tokens: QuotaRequest,
        *,
        price: float,
        num_requests: int,
        gateway: str,
        running: int,
        most_running: int,
    ) -> Granted | None:
        self.num_takes += 1
        if self.away:
            return None
        others = sum(count for name, count in self.running.items() if name != gateway)
        place = not (most_running and others + running > most_running)
        if place:
            self.running[gateway] = running
        given = []
        for name, wanted in (("requests", requests), ("tokens", tokens)):
            bucket = self.levels.setdefault(name, TokenBucket(wanted.capacity, self.clock()))
            bucket.level += wanted.back
            bucket.refill(Rate(wanted.rate, wanted.capacity), self.clock())
            amount = max(0.0, min(bucket.level, wanted.amount))
            if name == "requests":
                amount = max(float(int(amount)), num_requests if bucket.level >= 1 else 0.0)
            elif bucket.level > 0:
                amount = max(amount, price)
            amount *= place
            given.append(amount)
            # The script keeps and answers six decimals.
            given[-1], bucket.level = round(amount, 6), round(bucket.level - amount, 6)
        return Granted(place, given[0], given[1], self.levels["requests"].level, self.levels["tokens"].level)


def tenant(burst_s: float = 0.5, **quota: Any) -> tenants_pb2.Tenant:
    """`burst_s` 0: the quota's own bursts."""
    if burst_s:
        quota["burst_requests"] = max(1, int(quota.get("requests_per_second", 0) * burst_s))
        quota["burst_tokens"] = int(quota.get("tokens_per_minute", 0) / 60 * burst_s)
    return tenants_pb2.Tenant(name="t", quota=tenants_pb2.Quota(**quota))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(clock)


def keeper(store: Store, name: str = "g") -> QuotaKeeper:
    return QuotaKeeper(cast(Any, SimpleNamespace(quotas=store)), name, store.clock)


async def asks(at: QuotaKeeper, who: tenants_pb2.Tenant, num_tokens: int = 10) -> bool:
    """Whether a request is let in, which then comes to so many tokens."""
    try:
        async with at.held(who, num_tokens / 2, num_tokens) as charge:
            charge.num_tokens = num_tokens
    except Overloaded:
        return False
    return True


async def test_three_gateways_give_out_one_quota_of_requests(store: Store, clock: Clock) -> None:
    gateways, who = [keeper(store, name) for name in "abc"], tenant(requests_per_second=20)
    let_in = 0
    for step in range(60 * 200):
        let_in += await asks(gateways[step % 3], who)
        clock.now_s += 1 / 200
    assert 0.98 * 1200 <= let_in <= 1.02 * 1200


@pytest.mark.parametrize("num_tokens", [3, 40, 700])
async def test_three_gateways_give_out_one_quota_of_tokens(store: Store, clock: Clock, num_tokens: int) -> None:
    gateways, who = [keeper(store, name) for name in "abc"], tenant(tokens_per_minute=60_000)
    let_in = 0
    for step in range(60 * 400):
        let_in += await asks(gateways[step % 3], who, num_tokens)
        clock.now_s += 1 / 400
    # The bucket may be in debt for one request.
    assert 0.98 * 60_000 <= let_in * num_tokens <= 1.02 * 60_000 + num_tokens


async def test_a_minutes_quota_admits_a_minutes_burst_and_then_the_rate(store: Store, clock: Clock) -> None:
    gateways, who = [keeper(store, name) for name in "ab"], tenant(0, tokens_per_minute=60_000)
    let_in = 0
    for number in range(1000):
        let_in += await asks(gateways[number % 2], who, 500)
    assert let_in == 60_000 // 500
    for step in range(60 * 100):
        let_in += await asks(gateways[step % 2], who, 500)
        clock.now_s += 1 / 100
    assert let_in * 500 == pytest.approx(2 * 60_000, rel=0.02)


@pytest.mark.parametrize("num_output", [pytest.param(20, marks=pytest.mark.slow), 300])
async def test_answers_that_run_at_once_stay_within_the_burst_and_the_rate(
    store: Store, clock: Clock, num_output: int
) -> None:
    """Prompts are four times as long as was estimated, and answers longer or shorter than expected."""
    gateways, who = [keeper(store, name) for name in "ab"], tenant(0, tokens_per_minute=600_000)
    used = 0

    async def ask(number: int) -> None:
        nonlocal used
        with suppress(Overloaded):
            async with gateways[number % 2].held(who, 10, None) as charge:
                used += 40
                charge.take(30)
                for count in range(1, num_output + 1):
                    used += 1
                    if count > charge.expected_tokens:
                        charge.take(1)
                    await asyncio.sleep(0)
                charge.ended(40, num_output)

    running: set[asyncio.Task[None]] = set()
    for step in range(60 * 50):
        while len(running) < 32:
            running.add(asyncio.create_task(ask(step + len(running))))
        for _ in range(20):
            await asyncio.sleep(0)
        running = {task for task in running if not task.done()}
        clock.now_s += 1 / 50
        if step in (1000, 2999):
            allowed = 600_000 * (1 + clock.now_s / 60 - 100 / 60)
            # Those that run may have just begun.
            assert used <= 1.02 * allowed + len(running) * (num_output + 40)
    assert used >= 0.98 * 2 * 600_000
    await asyncio.gather(*running)


async def test_what_was_read_is_charged_though_it_is_refused_then(store: Store, clock: Clock) -> None:
    one, who, num_read = keeper(store), tenant(0, tokens_per_minute=6000), 0
    for _ in range(100):
        with suppress(Overloaded, InvalidRequest):
            async with one.held(who, 500, 0) as charge:
                charge.worked = 500
                num_read += 500
                raise InvalidRequest("prompt", "is too long")
    assert num_read == 6000
    clock.now_s += 60
    assert await asks(one, who, 500)


async def test_a_burst_may_be_smaller_or_larger_than_a_minutes_quota(store: Store) -> None:
    for name, burst in (("small", 5000), ("large", 200_000)):
        who = tenant(0, tokens_per_minute=60_000, burst_tokens=burst)
        who.name, store.levels = name, {}
        one = keeper(store)
        let_in = sum([await asks(one, who, 500) for _ in range(1000)])
        assert let_in == burst // 500
    who = tenant(0, requests_per_second=10, burst_requests=30)
    who.name, store.levels = "requests", {}
    assert sum([await asks(keeper(store), who) for _ in range(100)]) == 30


async def test_what_remains_is_what_the_bucket_has_whoever_used_it(store: Store, clock: Clock) -> None:
    a, b, who = keeper(store, "a"), keeper(store, "b"), tenant(0, tokens_per_minute=60_000, requests_per_second=10)
    fresh = a.remaining(who)
    assert (fresh["tokens"].limit, fresh["tokens"].remaining, fresh["tokens"].reset_s) == (60_000, 60_000, 0)
    for one in (a, b):
        async with one.held(who, 5900, 100) as charge:
            charge.num_tokens = 6000
    assert b.remaining(who)["tokens"].remaining == pytest.approx(48_000, rel=0.02)
    assert b.remaining(who)["requests"].remaining == pytest.approx(8, abs=1)
    assert b.remaining(who)["tokens"].reset_s == pytest.approx(12, rel=0.05)
    clock.now_s += 6
    assert b.remaining(who)["tokens"].remaining == pytest.approx(54_000, rel=0.02)


async def test_without_the_store_gateways_divide_the_quota(store: Store, clock: Clock) -> None:
    gateways, who = [keeper(store, name) for name in "abc"], tenant(requests_per_second=20)
    for one in gateways:
        one.num_gateways = 3
    store.away = True
    let_in = 0
    for step in range(20 * 200):
        let_in += await asks(gateways[step % 3], who)
        clock.now_s += 1 / 200
    assert 0.95 * 400 <= let_in <= 1.2 * 400


async def test_a_slice_serves_many_requests_and_the_store_is_asked_seldom(store: Store, clock: Clock) -> None:
    one, who = keeper(store), tenant(requests_per_second=1000)
    for _ in range(900):
        assert await asks(one, who)
        clock.now_s += 1 / 900
    assert store.num_takes < 20


async def test_who_is_over_the_quota_hears_which_and_when_to_ask_again(store: Store, clock: Clock) -> None:
    one, who = keeper(store), tenant(requests_per_second=2)
    assert await asks(one, who)
    with pytest.raises(Overloaded) as caught:
        async with one.held(who, 1, 1):
            pass
    error = caught.value
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert "2 requests per second" in error.message
    clock.now_s += error.retry_after_s or 0
    assert await asks(one, who)


async def test_a_tenant_that_asks_for_many_times_its_quota_costs_the_store_no_more(store: Store, clock: Clock) -> None:
    refused: list[tuple[str, str]] = []
    one, who = keeper(store), tenant(requests_per_second=20)
    one.on_refusal = lambda name, quota: refused.append((name, quota))
    let_in = 0
    for _ in range(10 * 1000):
        let_in += await asks(one, who)
        clock.now_s += 1 / 1000
    assert 0.98 * 200 <= let_in <= 1.1 * 200
    assert store.num_takes < 3 * let_in
    assert len(refused) == 10_000 - let_in and set(refused) == {("t", "requests_per_second")}


async def test_how_long_a_debt_takes_is_told_to_everybody(store: Store, clock: Clock) -> None:
    one, who = keeper(store), tenant(tokens_per_minute=600)
    assert await asks(one, who, 100)
    waits = []
    for _ in range(40):
        with pytest.raises(Overloaded) as caught:
            async with one.held(who, 50, 100):
                pass
        waits.append((caught.value.retry_after_s or 0.0) + clock.now_s)
        clock.now_s += 0.1
    # What the answer came short of its price is back with the store after half a second.
    assert max(waits[10:]) - min(waits[10:]) < 0.01


async def test_a_request_larger_than_the_bucket_is_let_in_and_paid_off(store: Store, clock: Clock) -> None:
    one, who = keeper(store), tenant(tokens_per_minute=600)
    assert await asks(one, who, 100)
    assert not await asks(one, who, 100)
    clock.now_s += 9.0
    # The price was 150, of which 50 came back: 95 of debt are paid off after 9.5 s.
    assert not await asks(one, who, 100)
    clock.now_s += 1.0
    assert await asks(one, who, 100)


async def test_a_price_is_paid_whatever_its_decimals(store: Store, clock: Clock) -> None:
    one, who, paid = keeper(store), tenant(tokens_per_minute=600), 0
    for num_tokens in range(60):
        async with one.held(who, num_tokens / 7, None) as charge:
            charge.ended(0, num_tokens)
            paid += 1
        clock.now_s += 60
    assert paid == 60


@pytest.mark.parametrize("away", [False, True])
async def test_a_request_with_more_answers_than_the_bucket_holds_is_let_in_and_paid_off(
    store: Store, clock: Clock, away: bool
) -> None:
    one, who = keeper(store), tenant(requests_per_second=4)
    store.away = away
    let_in = 0
    for _ in range(100):
        with suppress(Overloaded):
            async with one.held(who, 1, 1, num_answers=8):
                let_in += 1
        clock.now_s += 0.5
    # 50 s at half a request of eight answers each second.
    assert let_in == pytest.approx(25, abs=1)


@pytest.mark.parametrize("away", [True, False])
async def test_tokens_that_nobody_needed_come_back_though_the_next_call_gives_nothing(
    store: Store, clock: Clock, away: bool
) -> None:
    one, who = keeper(store), tenant(tokens_per_minute=600, concurrent_requests=2)
    async with one.held(who, 1000, 1):
        pass
    # A thousand came back to this gateway. It is for the store's bucket, which is in debt by as much.
    clock.now_s += 1
    store.away, store.running["other"] = away, 2
    assert away is await asks(one, who)
    store.away, store.running["other"] = False, 0
    assert await asks(one, who)


async def test_a_tenant_below_its_quota_is_not_refused_by_any_of_many_gateways(store: Store, clock: Clock) -> None:
    gateways, who, chance = [keeper(store, name) for name in "abcd"], tenant(requests_per_second=20), random.Random(1)
    plain, rate, refused = TokenBucket(20, 0), Rate(20, 20), 0
    who.quota.burst_requests = 20
    for _ in range(60 * 14):
        clock.now_s += chance.expovariate(14)
        plain.refill(rate, clock.now_s)
        plain.level -= 1
        refused += not await asks(chance.choice(gateways), who)
        assert plain.level >= 0, "one bucket would refuse"
    assert refused == 0


async def test_each_time_without_the_store_begins_with_what_that_had_last(store: Store, clock: Clock) -> None:
    one, who = keeper(store), tenant(0, tokens_per_minute=6000)
    for used, away in ((0, True), (6500, False), (0, True)):
        store.away = away
        let_in = sum([await asks(one, who, 100) for _ in range(100)])
        if used:
            assert let_in == 60
        clock.now_s += 0 if away else 0.5
    assert let_in <= 1, "a debt of half a second is paid, and this is the second time"


async def test_a_request_that_begins_while_ends_are_reported_is_reported_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_keeper, "_REPORT_S", 3600.0)
    one, who = keeper(store), tenant(concurrent_requests=1)
    reported, next_one = asyncio.Event(), one.held(who, 1, 1)

    async def report_running(gateway: str, running: dict[str, int]) -> None:
        if running == {"t": 0}:
            # Before the report has arrived.
            await next_one.__aenter__()
        elif running:
            reported.set()

    store.report_running = report_running  # type: ignore[attr-defined]
    one.store.workers = lambda role: asyncio.sleep(0, [])  # type: ignore[union-attr,method-assign,misc]
    reporting = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    async with one.held(who, 1, 1):
        pass
    async with asyncio.timeout(10):
        await reported.wait()
    reporting.cancel()
    await next_one.__aexit__(None, None, None)


async def test_so_many_run_at_once_on_all_gateways_together(store: Store) -> None:
    a, b, who = keeper(store, "a"), keeper(store, "b"), tenant(concurrent_requests=2)
    async with a.held(who, 1, 1):
        async with b.held(who, 1, 1):
            assert not await asks(a, who)
        store.running["b"] = 0
        assert await asks(a, who)


async def test_a_request_that_never_came_to_be_costs_no_tokens(store: Store) -> None:
    one, who = keeper(store), tenant(tokens_per_minute=600)
    for _ in range(50):
        async with one.held(who, 1000, 1000):
            pass
    assert await asks(one, who)


async def test_what_costs_no_tokens_is_let_in_whatever_the_debt(store: Store) -> None:
    one, who = keeper(store), tenant(tokens_per_minute=600)
    assert await asks(one, who, 10_000)
    assert not await asks(one, who, 1)
    for store.away in (False, True):
        async with one.held(who, 0, 0):
            pass


async def test_without_a_quota_nobody_asks_the_store(store: Store) -> None:
    assert await asks(keeper(store), tenants_pb2.Tenant(name="t"))
    assert store.num_takes == 0


async def test_requests_that_come_at_once_share_one_slice(store: Store) -> None:
    one, who = keeper(store), tenant(requests_per_second=100)
    assert sum(await asyncio.gather(*(asks(one, who) for _ in range(200)))) == 50


def test_a_slice_that_nobody_wanted_is_given_up_and_a_debt_is_not() -> None:
    slice_, debt = Balance(5, 0.0), Balance(-5, 0.0)
    for balance in (slice_, debt):
        balance.settle(0.1)
    assert (slice_.level, debt.level) == (5, -5)
    for balance in (slice_, debt):
        balance.settle(10.0)
    assert (slice_.level, debt.level) == (0, -5)


def test_the_price_of_an_answer_is_the_tenants_mean_at_most() -> None:
    mean = MeanTokens()
    for _ in range(200):
        mean.add(20)
    assert mean.expected(4096) == pytest.approx(20, abs=1)
    assert mean.expected(5) == 5
    assert mean.expected(None) == pytest.approx(20, abs=1)
