"""The routers that follow this control plane's plan: the last report of each, and the decisions to send to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.errors import Unavailable
from outrider.rpc.v1 import policy_pb2 as policy

from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.plan import TargetState


def not_leading() -> Unavailable:
    return Unavailable("another control plane leads, or none yet", reason="NOT_LEADER", retry_after_s=1.0)


@dataclass(slots=True, eq=False)
class Follower:
    """One router."""

    states: dict[str, TargetState] = field(default_factory=dict)
    busy: float = 0.0
    reaches_store: bool = False
    pending: dict[Cell, policy.TenantDecision] = field(default_factory=dict)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    """This control plane does not lead any more."""

    def send(self, decisions: Mapping[Cell, policy.TenantDecision]) -> None:
        self.pending.update(decisions)
        self.filled.set()

    async def next(self) -> list[policy.TenantDecision]:
        """Waits for changed decisions and returns them. Raises Unavailable where another leads by now."""
        await self.filled.wait()
        self.filled.clear()
        if self.over:
            raise not_leading()
        sent, self.pending = self.pending, {}
        return list(sent.values())


class Followers(set[Follower]):
    def send(self, decisions: Mapping[Cell, policy.TenantDecision]) -> None:
        for follower in self if decisions else ():
            follower.send(decisions)

    def end(self) -> None:
        """This control plane leads no more: ends their calls, so that they look for another."""
        for follower in self:
            follower.over = True
            follower.filled.set()
        self.clear()

    @property
    def reach_store(self) -> bool:
        return any(follower.reaches_store for follower in self)

    def states(self) -> dict[str, TargetState]:
        """The targets' states over all routers: all drafts that any router can use, and the cheapest worker's price."""
        merged: dict[str, TargetState] = {}
        for follower in self:
            for model, state in follower.states.items():
                known = merged.get(model)
                if known is None:
                    merged[model] = state
                else:
                    prices = [price for price in (known.price, state.price) if price]
                    best = max(known.best_chance, state.best_chance)
                    merged[model] = TargetState(
                        known.drafts | state.drafts,
                        min(prices, default=0.0),
                        best,
                        known.candidates | state.candidates,
                    )
        return merged
