"""Whose request goes next where a model's targets are nearly full: weighted deficit round robin over tenants.

A request costs the tokens that are expected of it. While less than `BUSY` of the places is taken, whoever comes gets
one. Above that only tenants below their weighted share do, so that the last fifth is there for those that ask for
little; the others wait. Pure: rooms and the clock are arguments. (Shreedhar and Varghese, "Efficient fair queueing
using deficit round robin", 1995.)

A place is a sequence, and room for its tokens in a KV cache: whichever of the two is scarcer decides.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

BUSY = 0.8
ACTIVE_S = 10.0
"""How long a tenant that asks for nothing keeps its share."""
_QUANTUM = 128.0
# Weight of the newest request in what is known of all.
_MEMORY = 0.05


@dataclass(frozen=True, slots=True)
class Room:
    """Of a model's targets, as one router sees it; in sequences."""

    places: float
    """That there are."""
    free: float
    part: float
    """Of `places`, this router's: what tenants have shares of."""
    tokens: float = math.inf
    """That the targets' KV caches hold together."""
    free_tokens: float = math.inf

    def allows(self, running: int, held_tokens: float, share: float) -> bool:
        """One more request of a tenant that has so much already: anybody's, unless it is nearly full."""
        if self.places - self.free >= BUSY * self.places and running >= self.part * share:
            return False
        nearly_full = self.tokens - self.free_tokens >= BUSY * self.tokens
        return not (nearly_full and held_tokens >= self.tokens * self.part / self.places * share)

    def fits(self, ticket: Ticket) -> bool:
        """What is longer than all caches together is let in where nothing else is: its target says what is wrong."""
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
    """Of `cost`, the answer's."""
    admitted_s: float | None = None
    """When it got its place; None as long as it waits."""


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
        """From those that wait. Raises KeyError."""
        del self.waiting[ticket]
        self.waiting_cost -= ticket.cost
        if not self.waiting:
            self.waiting_cost = self.deficit = 0.0

    @property
    def first(self) -> Ticket:
        return next(iter(self.waiting))


@dataclass(slots=True)
class _Means:
    """Of requests that have ended, the newest most; 0 before the first."""

    cost: float = 0.0
    held_s: float = 0.0
    """How long they had their places."""

    def add(self, cost: float, held_s: float) -> None:
        share = _MEMORY if self.held_s else 1.0
        self.cost += share * (cost - self.cost)
        self.held_s += share * (held_s - self.held_s)


class FairQueue:
    """Of one model at one router: who waits, and who has a place."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_running = 0
        self.held_tokens = 0.0
        """Expected, of those that have a place."""
        self.held_output = 0.0
        """Of these, the answers'."""
        self.means = _Means()
        self._admitted: deque[tuple[float, float]] = deque()
        """When, and at what cost, of late."""
        self._accounts: dict[str, _Account] = {}
        self._ring: dict[str, _Account] = {}
        """Those that wait for something, in the order of their turns."""
        self._idle: OrderedDict[str, float] = OrderedDict()
        """Those that neither wait nor run, and since when."""
        self._weights = 0.0
        """Of all accounts."""

    def put(self, ticket: Ticket, now_s: float) -> None:
        """It waits from now on; `take` says when it need not any more."""
        account = self._account(ticket, now_s)
        account.waiting[ticket] = None
        account.waiting_cost += ticket.cost
        self._ring[ticket.tenant] = account
        self.num_waiting += 1

    def take(self, room: Room, now_s: float) -> list[Ticket]:
        """Those that get a place now. Each of them has to `leave` once it is over."""
        taken = []
        while self._ring and room.free >= 1 and (ready := self._ready(room)):
            account = self._next(ready)
            ticket = account.first
            if not room.fits(ticket):
                # Nobody overtakes it: it would wait for as long as shorter ones come.
                break
            account.deficit -= ticket.cost
            self._admit(self._drop(ticket), ticket, now_s)
            room = room.without(ticket)
            taken.append(ticket)
        return taken

    def admitted_since(self, since_s: float) -> float:
        """Tokens expected of requests that got their place since then. Never asked for a time before one asked for."""
        while self._admitted and self._admitted[0][0] < since_s:
            self._admitted.popleft()
        return sum(cost for _, cost in self._admitted)

    def admit(self, ticket: Ticket, now_s: float) -> None:
        """It has a place already, whoever waits for one."""
        self._admit(self._account(ticket, now_s), ticket, now_s)

    def push_out(self) -> Ticket:
        """The newest of the tenant that has most waiting for its weight; it does not wait any more."""
        account = max(self._ring.values(), key=lambda a: (len(a.waiting) / a.weight, a.waiting_cost))
        ticket = next(reversed(account.waiting))
        self._drop(ticket)
        return ticket

    def leave(self, ticket: Ticket, now_s: float) -> None:
        """It is over, or waits no longer."""
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
        """Until it would have a place, behind what its tenant has waiting, at the rate at which places become free.

        None while that is not known: nothing has ended yet.
        """
        if not self.means.held_s:
            return None
        account = self._ring.get(ticket.tenant)
        before = account.waiting_cost if account is not None else 0.0
        # One that waits is in that sum. Another one needs a place as well, of whatever length the one is that ends.
        own = 0.0 if account is not None and ticket in account.waiting else self.means.cost
        rate = max(1, self.num_running) * self.means.cost / self.means.held_s
        others = sum(other.weight for tenant, other in self._ring.items() if tenant != ticket.tenant)
        return (before + own) * (ticket.weight + others) / (rate * ticket.weight)

    def _ready(self, room: Room) -> list[_Account]:
        return [a for a in self._ring.values() if room.allows(a.running, a.held_tokens, a.weight / self._weights)]

    def _next(self, ready: list[_Account]) -> _Account:
        """Whose turn it is, after as many rounds at once as bring the first of them to it."""
        rounds = max(0, min(math.ceil((a.first.cost - a.deficit) / (_QUANTUM * a.weight)) for a in ready))
        for account in ready:
            account.deficit += rounds * _QUANTUM * account.weight
        return max(ready, key=lambda a: a.deficit >= a.first.cost)

    def _admit(self, account: _Account, ticket: Ticket, now_s: float) -> None:
        ticket.admitted_s = now_s
        self._admitted.append((now_s, ticket.cost))
        self._count(account, ticket, 1)

    def _count(self, account: _Account, ticket: Ticket, sign: int) -> None:
        account.running += sign
        account.held_tokens += sign * ticket.cost
        self.num_running += sign
        self.held_tokens += sign * ticket.cost
        self.held_output += sign * ticket.output

    def _drop(self, ticket: Ticket) -> _Account:
        """From those that wait; the tenant's next turn comes after all others'."""
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
        self._weights += ticket.weight - account.weight
        account.weight = ticket.weight
        return account

    def _forget(self, now_s: float) -> None:
        while self._idle:
            tenant, since_s = next(iter(self._idle.items()))
            if now_s - since_s < ACTIVE_S:
                return
            del self._idle[tenant]
            self._weights -= self._accounts.pop(tenant).weight
        if not self._accounts:
            # Sums of what comes and goes drift.
            self._weights = 0.0
