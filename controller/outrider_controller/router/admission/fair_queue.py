"""The order of requests where a model's targets are nearly full: weighted deficit round robin over tenants.

A request costs its expected tokens, of prompt and answer. While less than `BUSY` of the places is taken, every request
gets one. Above that only tenants below their weighted share do (`outrider.runtime.places`), so that the last fifth
stays free for tenants with little load; the others wait. Pure: rooms and the clock are arguments. (Shreedhar and
Varghese, "Efficient fair queueing using deficit round robin", 1995.)

A place is a sequence slot and room for its tokens in a KV cache; the scarcer of the two decides.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

from outrider.runtime.places import TenantShares
from outrider.tuning import NEWEST, USUAL_TOKENS

from outrider_controller.router.tuning import ACTIVE_S


@dataclass(frozen=True, slots=True)
class Room:
    """The room at a model's targets, as one router sees it; in sequences where not in tokens."""

    places: float
    """All, taken or free."""
    free: float
    part: float
    """This router's part of `places`, which its tenants share."""
    tokens: float = math.inf
    """Capacity of all the targets' KV caches."""
    free_tokens: float = math.inf

    def fits(self, ticket: Ticket) -> bool:
        """A request longer than all caches together fits once they are empty: its target then refuses it."""
        return self.free >= 1 and self.free_tokens >= min(ticket.cost, self.tokens)

    def without(self, ticket: Ticket) -> Room:
        return replace(self, free=self.free - 1, free_tokens=self.free_tokens - ticket.cost)


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from its arrival to its end."""

    tenant: str
    weight: float
    cost: float
    """Expected tokens, of prompt and answer."""
    arrived_s: float
    output: float = 0.0
    """The answer's part of `cost`."""
    admitted_s: float | None = None
    """When it got its place; None while it waits."""


@dataclass(slots=True)
class _Account:
    """One tenant's requests. `waiting` is a set in the order of arrival."""

    weight: float
    waiting: dict[Ticket, None] = field(default_factory=dict)
    waiting_cost: float = 0.0
    running: int = 0
    held_tokens: float = 0.0
    deficit: float = 0.0

    def drop(self, ticket: Ticket) -> None:
        """Removes it from the waiting ones. Raises KeyError."""
        del self.waiting[ticket]
        self.waiting_cost -= ticket.cost
        if not self.waiting:
            self.waiting_cost = self.deficit = 0.0

    @property
    def first(self) -> Ticket:
        return next(iter(self.waiting))


@dataclass(slots=True)
class _Means:
    """Exponentially weighted means over ended requests; 0 before the first."""

    cost: float = 0.0
    held_s: float = 0.0
    """How long they had their places."""

    def add(self, cost: float, held_s: float) -> None:
        share = NEWEST if self.held_s else 1.0
        self.cost += share * (cost - self.cost)
        self.held_s += share * (held_s - self.held_s)


class FairQueue:
    """The requests for one model at one router: those that wait, and those that have a place."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_running = 0
        self.held_tokens = 0.0
        """Expected tokens of the requests that have a place."""
        self.held_output = 0.0
        """The answers' part of `held_tokens`."""
        self.means = _Means()
        self._admitted: deque[tuple[float, float]] = deque()
        """Of recently admitted requests: time and cost."""
        self._admitted_cost = 0.0
        self._accounts: dict[str, _Account] = {}
        self._ring: dict[str, _Account] = {}
        """Tenants with waiting requests, in the order of their turns."""
        self._idle: OrderedDict[str, float] = OrderedDict()
        """Tenants with neither waiting nor running requests, and since when."""
        self._shares = TenantShares()
        """Of all accounts."""

    def put(self, ticket: Ticket, now_s: float) -> None:
        """Lets it wait until `take` returns it."""
        account = self._account(ticket, now_s)
        account.waiting[ticket] = None
        account.waiting_cost += ticket.cost
        self._ring[ticket.tenant] = account
        self.num_waiting += 1

    def take(self, room: Room, now_s: float) -> list[Ticket]:
        """Those that get a place now. Each has to `leave` at its end."""
        taken = []
        while self._ring and room.free >= 1 and (ready := self._ready(room)):
            account = self._next(ready)
            ticket = account.first
            if not room.fits(ticket):
                # No shorter request overtakes it, or it might wait forever.
                break
            account.deficit -= ticket.cost
            self._admit(self._drop(ticket), ticket, now_s)
            room = room.without(ticket)
            taken.append(ticket)
        return taken

    def admitted_since(self, since_s: float) -> float:
        """Expected tokens of the requests admitted since then. `since_s` must not decrease from call to call."""
        while self._admitted and self._admitted[0][0] < since_s:
            self._admitted_cost -= self._admitted.popleft()[1]
        return self._admitted_cost

    def admit(self, ticket: Ticket, now_s: float) -> None:
        """Gives it a place at once, ahead of all that wait."""
        self._admit(self._account(ticket, now_s), ticket, now_s)

    def push_out(self) -> Ticket:
        """Removes and returns the newest waiting request of the tenant that has most waiting for its weight."""
        account = max(self._ring.values(), key=lambda a: (len(a.waiting) / a.weight, a.waiting_cost))
        ticket = next(reversed(account.waiting))
        self._drop(ticket)
        return ticket

    def leave(self, ticket: Ticket, now_s: float) -> None:
        account = self._accounts.get(ticket.tenant)
        if account is None:
            return
        if ticket.admitted_s is not None:
            self._count(account, ticket, -1)
            self.means.add(ticket.cost, now_s - ticket.admitted_s)
        elif ticket in account.waiting:
            self._drop(ticket)
        if not account.running and not account.waiting:
            self._idle[ticket.tenant] = now_s

    def wait_s(self, ticket: Ticket) -> float | None:
        """Expected seconds until it gets a place, after its tenant's other requests, at the rate at which requests end.

        None while no request has ended, when the rate is unknown.
        """
        if not self.means.held_s:
            return None
        account = self._ring.get(ticket.tenant)
        before = account.waiting_cost if account is not None else 0.0
        # A waiting request is in that sum already. Another needs one more place: that of a request of mean cost.
        own = 0.0 if account is not None and ticket in account.waiting else self.means.cost
        rate = max(1, self.num_running) * self.means.cost / self.means.held_s
        others = sum(other.weight for tenant, other in self._ring.items() if tenant != ticket.tenant)
        return (before + own) * (ticket.weight + others) / (rate * ticket.weight)

    def _ready(self, room: Room) -> list[_Account]:
        return [account for tenant, account in self._ring.items() if self._may(tenant, account, room)]

    def _may(self, tenant: str, account: _Account, room: Room) -> bool:
        """Whether this tenant may get one more place."""
        allow, tokens = self._shares.allow, room.tokens * room.part / room.places
        return allow(tenant, account.running, room.places - room.free, room.places, room.part) and allow(
            tenant, account.held_tokens, room.tokens - room.free_tokens, room.tokens, tokens
        )

    def _next(self, ready: list[_Account]) -> _Account:
        """The next account in turn, after as many rounds of credit as the first to reach its cost needs: each gives the
        tokens of a usual answer, so that most serve a request."""
        rounds = max(0, min(math.ceil((a.first.cost - a.deficit) / (USUAL_TOKENS * a.weight)) for a in ready))
        for account in ready:
            account.deficit += rounds * USUAL_TOKENS * account.weight
        return max(ready, key=lambda a: a.deficit >= a.first.cost)

    def _admit(self, account: _Account, ticket: Ticket, now_s: float) -> None:
        ticket.admitted_s = now_s
        self._admitted.append((now_s, ticket.cost))
        self._admitted_cost += ticket.cost
        self._count(account, ticket, 1)

    def _count(self, account: _Account, ticket: Ticket, sign: int) -> None:
        account.running += sign
        account.held_tokens += sign * ticket.cost
        self.num_running += sign
        self.held_tokens += sign * ticket.cost
        self.held_output += sign * ticket.output

    def _drop(self, ticket: Ticket) -> _Account:
        """Removes it from the waiting ones; the tenant's next turn comes after all others'."""
        account = self._ring.pop(ticket.tenant)
        account.drop(ticket)
        self.num_waiting -= 1
        if account.waiting:
            self._ring[ticket.tenant] = account
        return account

    def _account(self, ticket: Ticket, now_s: float) -> _Account:
        self._forget(now_s)
        self._idle.pop(ticket.tenant, None)
        account = self._accounts.get(ticket.tenant)
        if account is None:
            account = self._accounts[ticket.tenant] = _Account(0.0)
        self._shares.add(ticket.tenant, ticket.weight)
        account.weight = ticket.weight
        return account

    def _forget(self, now_s: float) -> None:
        while self._idle:
            tenant, since_s = next(iter(self._idle.items()))
            if now_s - since_s < ACTIVE_S:
                return
            del self._idle[tenant]
            del self._accounts[tenant]
            self._shares.remove(tenant)
