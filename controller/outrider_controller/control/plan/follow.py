"""PolicyService: translates between gRPC messages and the plan's leader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any, TypeAlias

import grpc
from outrider.rpc.link import read_stream
from outrider.rpc.v1 import policy_pb2 as policy
from outrider.rpc.v1 import policy_pb2_grpc
from outrider.runtime.supervision import until_first_ends

from outrider_controller.control.plan.followers import Follower
from outrider_controller.control.plan.leading import PlanLeader

SERVICE = "outrider.rpc.v1.PolicyService"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    def __init__(self, leader: PlanLeader) -> None:
        self._leader = leader

    # Written with `context.write` and not as a generator: a cancelled call then ends inside its coroutine, at once.
    async def Follow(  # type: ignore[override]
        self, requests: AsyncIterator[policy.FollowRequest], context: Context
    ) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        follower = self._leader.follow(first.epoch)
        self._leader.received(follower, first)
        try:
            received = partial(self._leader.received, follower)
            await until_first_ends(read_stream(context, received), self._write(follower, context))
        finally:
            self._leader.followers.discard(follower)

    async def _write(self, follower: Follower, context: Context) -> None:
        while True:
            decisions = await follower.next()
            await context.write(policy.FollowResponse(epoch=self._leader.epoch, decisions=decisions))
