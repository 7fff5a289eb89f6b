"""The tenants' usage: sums over the rounds of their requests, and the task that writes them to the ledger.

Workers report how much of their time each sequence took; the router knows its tenant.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

from outrider.limits import MAX_TREE_TOKENS, clamp_us
from outrider.metadata.tenants.ledger import HOUR_S, LedgerStore, SourceSums, TenantUsage
from outrider.protocol.rounds import Round
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.runtime.supervision import background

from outrider_controller.router.request.checks import Request

log = logging.getLogger(__name__)

OTHERS = "_other"
"""No tenant can have this name."""
MAX_TENANTS = 10_000
"""Most tenants counted separately in an hour; the rest are counted together."""
_MAX_WAITING_HOURS = 24
_WRITE_EVERY_S = 10.0
# Rounding error of a share and of the times of its steps.
_ROUNDED_US = 2
# Calls whose part of a bill is remembered, also once they have ended.
_MAX_CALLS = 16_384
# What comes late of a sequence that has ended, and errors of clocks.
_GRACE_US = 1_000_000


@dataclass(slots=True)
class CallBill:
    """What one call of a gateway has put on the bill in tokens."""

    tenant: str = ""
    output_tokens: int = 0
    prompt: TenantUsage | None = None
    """The request and its prompt, where this call has committed the first token."""
    broken: bool = False
    """The answer goes on elsewhere: no more tokens are billed here."""


@dataclass(slots=True)
class Account:
    """What the worker that has a sequence open can add to a bill by its word, at most: time that has passed since the
    opening, and, after the sequence has ended here, the tokens that it could still have committed."""

    tenant: str
    worker_id: str
    opened_us: int
    tokens_left: int = 0
    """Once it has ended."""
    closed_us: int | None = None
    call: CallBill = field(default_factory=CallBill)
    _target_us: int = 0
    _draft_us: int = 0

    def target_time(self, said_us: int, now_us: int) -> int:
        counted = max(0, min(said_us, self._passed_us(now_us) - self._target_us))
        self._target_us += counted
        return counted

    def draft_time(self, said_us: int, now_us: int) -> int:
        counted = max(0, min(said_us, self._passed_us(now_us) - self._draft_us))
        self._draft_us += counted
        return counted

    def late(self, num_tokens: int) -> bool:
        """Whether a commit of so many tokens may still come."""
        self.tokens_left -= num_tokens
        return self.tokens_left >= 0

    def _passed_us(self, now_us: int) -> int:
        return (now_us if self.closed_us is None else self.closed_us) - self.opened_us + _GRACE_US


class UsageSums:
    """Sums by tenant. Never waits."""

    def __init__(self) -> None:
        self.sums: dict[str, TenantUsage] = {}
        self._calls: OrderedDict[int, CallBill] = OrderedDict()

    def began(self, call_id: int, tenant: str) -> CallBill:
        call = self._calls[call_id] = CallBill(tenant)
        if len(self._calls) > _MAX_CALLS:
            self._calls.popitem(last=False)
        return call

    def broke_off(self, call_id: int, num_tokens: int) -> None:
        """Takes off what the call has billed beyond the tokens that its gateway has, or else they would be billed with
        another call too. The time spent on them stays."""
        if (call := self._calls.pop(call_id, None)) is None:
            return
        call.broken = True
        usage = self.sums.get(call.tenant) or self._begin(call.tenant)
        taken = TenantUsage() if num_tokens or call.prompt is None else call.prompt
        taken.output_tokens = max(0, call.output_tokens - num_tokens)
        for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens"):
            # What was counted in an hour before stays in that.
            left = max(0, getattr(usage, name) - getattr(taken, name))
            setattr(usage, name, left)

    def round(
        self, account: Account, commit: sequence.Commit, done: Round, now_us: int, request: Request | None = None
    ) -> None:
        """Adds one commit; `done` was read from it. `request`: while it is still open.

        Fields that only usage needs are read from `commit`: to copy a field into `Round` first costs four times as
        much. A sequence's share of a target's time is bounded by the time of its steps.
        """
        usage = self.sums.get(account.tenant) or self._begin(account.tenant)
        if not (call := account.call).broken:
            if request is not None and done.base_len == request.begins_at:
                prompt_tokens = request.billed_prompt_tokens
                call.prompt = TenantUsage(1, prompt_tokens, min(done.num_cached_tokens, prompt_tokens))
                usage.add(call.prompt)
            call.output_tokens += done.num_tokens
            usage.output_tokens += done.num_tokens
        share_us, most_us = commit.share_us, done.verify_us + done.prefill_us + _ROUNDED_US
        share_us = account.target_time(min(share_us, most_us), now_us)
        if num_drafted := done.num_drafted:
            usage.drafted_tokens += num_drafted
            usage.verified_tokens += done.num_verified
            usage.accepted_tokens += done.num_accepted
            _add_sources(usage, commit, done, share_us)
            if num_branch_tokens := commit.num_branch_tokens:
                num_branch_tokens = min(num_branch_tokens, MAX_TREE_TOKENS)
                usage.drafted_tokens += num_branch_tokens
                usage.verified_tokens += num_branch_tokens
            if wasted_us := commit.wasted_us:
                if wasted_us > share_us:
                    wasted_us = share_us
                usage.target_wasted_us += wasted_us
                share_us -= wasted_us
        usage.target_useful_us += share_us
        if done.draft_active:
            spent_us = account.draft_time(commit.draft_stats.share_us, now_us)
            # It may be of time that was counted before.
            useful_us = min(done.draft_useful_us, now_us - account.opened_us)
            usage.draft_useful_us += useful_us
            usage.draft_wasted_us += spent_us - useful_us
            usage.drafted(commit.draft_stats.source, SourceSums(draft_us=spent_us))

    def ended(self, account: Account, used: sequence.SequenceUsage, now_us: int) -> None:
        """Adds the time that workers spent on a sequence after its last commit."""
        usage = self.sums.get(account.tenant) or self._begin(account.tenant)
        usage.target_useful_us += account.target_time(used.share_us, now_us)
        usage.draft_wasted_us += account.draft_time(used.draft_share_us, now_us)

    def take_all(self) -> dict[str, TenantUsage]:
        sums, self.sums = self.sums, {}
        return sums

    def _begin(self, tenant: str) -> TenantUsage:
        return self.sums.setdefault(tenant if len(self.sums) < MAX_TENANTS else OTHERS, TenantUsage())


def _add_sources(usage: TenantUsage, commit: sequence.Commit, done: Round, share_us: int) -> None:
    row_us = min(commit.drafted_us, share_us) / (done.num_drafted + commit.num_branch_tokens)
    for one in done.sources:
        # A late commit was not checked.
        drafted = min(one.num_drafted, MAX_TREE_TOKENS)
        verified, accepted = min(one.num_verified, drafted), min(one.num_accepted, done.num_accepted)
        target_us = min(round(one.num_drafted * row_us), share_us)
        usage.drafted(one.source, SourceSums(drafted, verified, accepted, target_us, clamp_us(one.draft_us)))


class LedgerWriter:
    """Writes one router's sums every 10 s while it is `running`. While Redis is away it keeps them by hour."""

    def __init__(
        self, usage: UsageSums, ledger: LedgerStore, router_id: str, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._usage = usage
        self._ledger = ledger
        self._router_id = router_id
        self._wall_clock = wall_clock
        self._hour = self._now_hour
        self._written: dict[str, TenantUsage] = {}
        """The sums of the present hour that Redis has."""
        self._waiting: dict[int, dict[str, TenantUsage]] = {}
        """The sums of past hours that Redis does not have yet."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Writes during the block, and the rest at its end."""
        try:
            async with background(self._run(), "ledger writer"):
                yield
        finally:
            # All of them: a store that has lost its data lacks those that have not changed since.
            self._written = {}
            await self.flush()

    async def flush(self) -> None:
        """Writes what has changed since the last time."""
        # If the clock is set back, the hour stays: new, smaller sums of an earlier hour would replace its larger ones.
        if (hour := self._now_hour) > self._hour:
            self._begin(hour)
        for past in list(self._waiting):
            if await self._ledger.write(past, self._router_id, self._waiting[past]):
                del self._waiting[past]
        # Compared here, so that a round need not mark what it changed.
        changed = {
            tenant: replace(usage) for tenant, usage in self._usage.sums.items() if usage != self._written.get(tenant)
        }
        if changed and await self._ledger.write(self._hour, self._router_id, changed):
            self._written |= changed

    async def _run(self) -> NoReturn:
        while True:
            await asyncio.sleep(min(_WRITE_EVERY_S, HOUR_S - self._wall_clock() % HOUR_S))
            try:
                await self.flush()
            except Exception:
                # The sums are kept, and the next turn writes them.
                log.exception("usage was not written")

    def _begin(self, hour: int) -> None:
        if sums := self._usage.take_all():
            self._waiting[self._hour] = sums
        self._hour, self._written = hour, {}
        if len(self._waiting) > _MAX_WAITING_HOURS:
            lost = self._waiting.pop(min(self._waiting))
            log.error("usage of %d tenants in an hour is lost: the metadata store was away for too long", len(lost))

    @property
    def _now_hour(self) -> int:
        return int(self._wall_clock() // HOUR_S)
