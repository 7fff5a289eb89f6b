"""Enforces the tenants' quotas over all gateways: requests per second, tokens per minute, running requests.

Takes slices of a quota from the store. While the store is unreachable, each gateway grants its part: the quota divided
by the number of gateways last seen.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from outrider import tuning
from outrider.errors import Overloaded
from outrider.gateway.tenants.quotas import Balance, MeanTokens, Rate, Remaining, TokenBucket, wait_s
from outrider.metadata.store import MetadataStore
from outrider.metadata.tenants.quota import Granted, QuotaRequest
from outrider.rpc.v1 import tenants_pb2, worker_pb2

log = logging.getLogger(__name__)
_REPORT_S = 1.0
_MIN_REPORT_S = 0.05
_MAX_TENANTS = 10_000
_RETRY_PLACE_S = 0.5


@dataclass(slots=True)
class Charge:
    """The charge for one request with all its answers."""

    price: float
    """In tokens."""
    expected_tokens: float
    """Per answer; part of the price."""
    num_answers: int = 1
    num_tokens: int = 0
    """Tokens of the ended answers, prompts included."""
    outputs: list[int] = field(default_factory=list)
    worked: float = 0.0
    """Tokens of what was read, which are charged although no answer to it began."""
    taken: float = 0.0
    """Tokens taken for it beyond the price, because it is longer than was expected."""
    used: Balance | TokenBucket | None = None
    """What its tokens are taken from."""

    def take(self, num_tokens: float) -> None:
        """Takes more tokens now, so that they are not given to others until it ends."""
        self.taken += num_tokens
        if self.used is not None:
            self.used.level -= num_tokens

    @property
    def left(self) -> float:
        """To be given back at the end."""
        return self.price + self.taken - (self.num_tokens if self.num_tokens or self.outputs else self.worked)

    def ended(self, prompt_tokens: int, output_tokens: int) -> None:
        """To be called at the end of each answer."""
        self.num_tokens += prompt_tokens + output_tokens
        self.outputs.append(output_tokens)


@dataclass(frozen=True, slots=True)
class _Closed:
    """The store had nothing left, and need not be asked before `until_s`."""

    quota: str = ""
    until_s: float = -math.inf
    refilled_s: float = 0.0
    """When the store will have enough again."""


@dataclass(slots=True)
class _Account:
    """One tenant at this gateway."""

    requests: Balance = field(default_factory=Balance)
    tokens: Balance = field(default_factory=Balance)
    back_requests: float = 0.0
    """To return to the store's bucket with the next call. The same for tokens."""
    back_tokens: float = 0.0
    closed: _Closed = _Closed()
    stored_requests: TokenBucket | None = None
    """The store's bucket as last seen; None before the first call. The same for tokens."""
    stored_tokens: TokenBucket | None = None
    alone_requests: TokenBucket | None = None
    alone_tokens: TokenBucket | None = None
    mean: MeanTokens = field(default_factory=MeanTokens)
    running: int = 0
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class QuotaKeeper:
    """The quotas at one gateway. Without a store it is taken to be the only one."""

    store: MetadataStore | None = None
    gateway: str = ""
    """Its id."""
    clock: Callable[[], float] = time.monotonic
    num_gateways: int = 1
    on_refusal: Callable[[str, str], None] = lambda tenant, quota: None
    _accounts: dict[str, _Account] = field(default_factory=dict)
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    _bounded: set[str] = field(default_factory=set)
    """Tenants with a limit on running requests that have some, or had at the last report."""

    @asynccontextmanager
    async def held(
        self, tenant: tenants_pb2.Tenant, prompt_tokens: float, max_tokens: int | None, num_answers: int = 1
    ) -> AsyncIterator[Charge]:
        """Charges one request while it runs; each answer counts as one. `prompt_tokens`: sum over all answers.

        Raises Overloaded with the time after which to retry.
        """
        account = self._account(tenant.name)
        expected_tokens = account.mean.expected(max_tokens)
        charge = Charge(prompt_tokens + num_answers * expected_tokens, expected_tokens, num_answers)
        account.running += num_answers
        try:
            async with self._charged(tenant, account, charge):
                yield charge
        finally:
            account.running -= num_answers
            for num_output in charge.outputs:
                if num_output:
                    account.mean.add(num_output)
            if tenant.quota.concurrent_requests:
                self._left.set()

    @asynccontextmanager
    async def _charged(self, tenant: tenants_pb2.Tenant, account: _Account, charge: Charge) -> AsyncIterator[None]:
        if not tenant.quota.ListFields():
            yield
            return
        # One at a time, because a slice taken for one request also serves those that wait behind it.
        async with account.taking:
            used = await self._admit(tenant, account, charge)
        if tenant.quota.tokens_per_minute:
            charge.used = used
        try:
            yield
        finally:
            if charge.used is not None:
                # A request of which nothing was read costs no tokens.
                charge.used.level += charge.left

    async def run(self) -> None:
        """Reports the running requests and counts the gateways, until cancelled."""
        while self.store is not None:
            try:
                running = {name: self._accounts[name].running for name in self._bounded}
                # Before anything is awaited: a tenant's next request may come meanwhile.
                self._bounded -= {name for name, count in running.items() if not count}
                await self.store.quotas.report_running(self.gateway, running)
                if any(self._account(name).running > count for name, count in running.items()):
                    # A request that began meanwhile was perhaps hidden by this report.
                    self._left.set()
                self.num_gateways = max(1, len(await self.store.workers(worker_pb2.WORKER_ROLE_GATEWAY)))
            except Exception:
                log.exception("quotas were not reported")
            # At once when a place became free, as another gateway may wait for it; else before the last report expires.
            await asyncio.sleep(_MIN_REPORT_S)
            await asyncio.wait({waiting := asyncio.ensure_future(self._left.wait())}, timeout=_REPORT_S)
            waiting.cancel()
            self._left.clear()

    async def _admit(self, tenant: tenants_pb2.Tenant, account: _Account, charge: Charge) -> Balance | TokenBucket:
        """Returns the balance or bucket that the request's tokens were taken from. Raises Overloaded."""
        quota, now_s = tenant.quota, self.clock()
        requests, tokens = Rate.of_requests(quota), Rate.of_tokens(quota)
        request_rate, token_rate = requests.rate, tokens.rate
        account.back_requests += account.requests.settle(now_s)
        account.back_tokens += account.tokens.settle(now_s)
        answers = charge.num_answers
        short = (request_rate and account.requests.missing(answers)) or (
            token_rate and charge.price and account.tokens.missing(charge.price)
        )
        if short and now_s < account.closed.until_s:
            raise self._exceeded(tenant, account.closed.quota, account.closed.refilled_s - now_s)
        if quota.concurrent_requests or short:
            granted = await self._take(tenant, account, charge, requests, tokens)
            if granted is None:
                return self._alone(tenant, account, charge)
            if not granted.place:
                raise self._too_many(tenant)
            account.requests.add(granted.requests, now_s)
            account.tokens.add(granted.tokens, now_s)
            if request_rate and account.requests.missing(answers):
                retry_after_s = wait_s(1 - granted.requests_left, request_rate)
                raise self._closed(tenant, account, "requests_per_second", retry_after_s)
            if token_rate and charge.price and account.tokens.missing(charge.price):
                retry_after_s = wait_s(-granted.tokens_left, token_rate)
                raise self._closed(tenant, account, "tokens_per_minute", retry_after_s)
        if request_rate:
            account.requests.level -= answers
        if token_rate:
            account.tokens.level -= charge.price
        return account.tokens

    async def _take(
        self, tenant: tenants_pb2.Tenant, account: _Account, charge: Charge, requests: Rate, tokens: Rate
    ) -> Granted | None:
        """Takes what is missing for this request, and a slice for later ones."""
        if self.store is None:
            return None
        most = tenant.quota.concurrent_requests
        if most:
            self._bounded.add(tenant.name)
        answers = math.ceil(account.requests.missing(charge.num_answers)) if requests.rate else 0
        num_requests = max(float(answers), requests.rate * tuning.SLICE_S) if answers else 0.0
        missing = account.tokens.missing(charge.price) if tokens.rate and charge.price else 0.0
        num_tokens = missing + tokens.rate * tuning.SLICE_S if missing else 0.0
        back_requests, back_tokens = account.back_requests, account.back_tokens
        account.back_requests = account.back_tokens = 0.0
        granted = await self.store.quotas.take(
            tenant.name,
            QuotaRequest(requests.rate, requests.capacity, num_requests, back_requests),
            QuotaRequest(tokens.rate, tokens.capacity, num_tokens, back_tokens),
            price=missing,
            num_requests=answers,
            gateway=self.gateway,
            running=account.running,
            most_running=most,
        )
        if granted is None:
            account.back_requests += back_requests
            account.back_tokens += back_tokens
            return None
        # The next time without a store begins with what it has then.
        account.alone_requests = account.alone_tokens = None
        now_s = self.clock()
        account.stored_requests = TokenBucket(granted.requests_left, now_s)
        account.stored_tokens = TokenBucket(granted.tokens_left, now_s)
        return granted

    def _alone(self, tenant: tenants_pb2.Tenant, account: _Account, charge: Charge) -> TokenBucket:
        """This gateway's part of the quota, by its own clock."""
        quota, now_s = tenant.quota, self.clock()
        if quota.concurrent_requests and account.running > max(1, quota.concurrent_requests // self.num_gateways):
            raise self._too_many(tenant)
        request_rate = Rate.of_requests(quota).part(self.num_gateways)
        token_rate = Rate.of_tokens(quota).part(self.num_gateways)
        requests = account.alone_requests = account.alone_requests or TokenBucket(1.0, now_s)
        tokens = account.alone_tokens = account.alone_tokens or self._part(account, token_rate)
        requests.refill(replace(request_rate, capacity=max(1.0, request_rate.capacity)), now_s)
        tokens.refill(token_rate, now_s)
        if request_rate.rate and requests.level < 1:
            raise self._exceeded(tenant, "requests_per_second", wait_s(1 - requests.level, request_rate.rate))
        if token_rate.rate and charge.price and tokens.level <= 0:
            raise self._exceeded(tenant, "tokens_per_minute", wait_s(-tokens.level, token_rate.rate))
        if request_rate.rate:
            requests.level -= charge.num_answers
        if token_rate.rate:
            tokens.level -= charge.price
        return tokens

    def _part(self, account: _Account, rate: Rate) -> TokenBucket:
        """The tokens that this gateway begins with alone: its own, and its part of what the store had last."""
        stored = account.stored_tokens
        if stored is None:
            return TokenBucket(rate.capacity, self.clock())
        return TokenBucket(stored.level / self.num_gateways + account.back_tokens + account.tokens.level, stored.at_s)

    def remaining(self, tenant: tenants_pb2.Tenant) -> dict[str, Remaining]:
        """What the tenant may still use of `requests` and `tokens`, of those that its quota limits."""
        account = self._account(tenant.name)
        rates = {"requests": Rate.of_requests(tenant.quota), "tokens": Rate.of_tokens(tenant.quota)}
        own_requests, own_tokens = (
            account.requests.level + account.back_requests,
            account.tokens.level + account.back_tokens,
        )
        known = {
            "requests": (account.stored_requests or account.alone_requests, own_requests),
            "tokens": (account.stored_tokens or account.alone_tokens, own_tokens),
        }
        return {name: self._remaining(rate, *known[name]) for name, rate in rates.items() if rate.rate}

    def _remaining(self, rate: Rate, stored: TokenBucket | None, level: float) -> Remaining:
        now = TokenBucket(rate.capacity, self.clock()) if stored is None else replace(stored)
        now.refill(rate, self.clock())
        return Remaining.of(rate, now.level + level)

    def _closed(self, tenant: tenants_pb2.Tenant, account: _Account, quota: str, retry_after_s: float) -> Overloaded:
        now_s = self.clock()
        account.closed = _Closed(quota, now_s + min(retry_after_s, tuning.SLICE_S), now_s + retry_after_s)
        return self._exceeded(tenant, quota, retry_after_s)

    def _exceeded(self, tenant: tenants_pb2.Tenant, quota: str, retry_after_s: float) -> Overloaded:
        self.on_refusal(tenant.name, quota)
        message = f"{tenant.name} is over its quota of {getattr(tenant.quota, quota):g} {quota.replace('_', ' ')}"
        return Overloaded(message, retry_after_s=retry_after_s, reason="QUOTA_EXCEEDED")

    def _too_many(self, tenant: tenants_pb2.Tenant) -> Overloaded:
        self.on_refusal(tenant.name, "concurrent_requests")
        most = tenant.quota.concurrent_requests
        message = f"{tenant.name} has {most} requests under way, as many as its quota allows"
        return Overloaded(message, retry_after_s=_RETRY_PLACE_S, reason="QUOTA_EXCEEDED")

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            if len(self._accounts) >= _MAX_TENANTS:
                self._accounts = {name: kept for name, kept in self._accounts.items() if kept.running}
            account = self._accounts[name] = _Account()
        return account
