"""Follows the control plane's plan: sends the evidence of the rounds each second and receives the decisions.

Knows no requests. While no control plane leads, it looks for one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, NoReturn

import grpc
from outrider.rpc.access.roles import ClusterSecret, Role, bearer
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.link import PeerLink, StreamEnded
from outrider.rpc.outbox import Outbox
from outrider.rpc.v1 import policy_pb2 as policy
from outrider.rpc.v1 import policy_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.plan import PLAN_EVERY_S
from outrider_controller.plan_messages import (
    decision_from_proto,
    evidence_to_proto,
    report_to_proto,
    sums_from_proto,
)
from outrider_controller.router.fleet.fleet import WorkerLeases
from outrider_controller.router.requests.settings import SettingsSender

_LOOK_EVERY_S = 0.5
# A leader sends a snapshot to each new follower: one that does not is taken for dead.
_SNAPSHOT_TIMEOUT_S = 2.0


class PlanFollower(PeerLink[policy.FollowResponse, Outbox[policy.FollowRequest]]):
    level = logging.DEBUG

    def __init__(
        self,
        router_id: str,
        settings_sender: SettingsSender,
        leases: WorkerLeases,
        connect: Connect = create_channel,
        secret: ClusterSecret | None = None,
    ) -> None:
        super().__init__("control plane", connect, Outbox())
        self._router_id = router_id
        self._settings_sender = settings_sender
        self._leases = leases
        self._metadata = bearer(secret.token(Role.ROUTER)) if secret is not None else ()
        self._epoch = 0
        self._followed = set[Cell]()
        """Those that control planes have decided."""
        self._tried, self._answered = asyncio.Event(), asyncio.Event()

    async def run(self) -> NoReturn:
        while True:
            for record in await self._leases.workers(worker.WORKER_ROLE_CONTROL):
                self.address = record.address
                await self.talk()
            self._tried.set()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def tried(self, timeout_s: float) -> None:
        """Returns once the first decisions were received, or no control plane was found that has any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tried.wait()

    async def _call(self, channel: grpc.aio.Channel) -> Any:
        stub: Any = policy_pb2_grpc.PolicyServiceStub(channel)
        self._answered.clear()
        return stub.Follow(metadata=self._metadata)

    async def _watch(self, call: Any) -> None:
        used_s, at_s = time.process_time(), time.monotonic()
        while True:
            now_used_s, now_s = time.process_time(), time.monotonic()
            self.outbox.put(self._request((now_used_s - used_s) / max(now_s - at_s, 1e-3)))
            used_s, at_s = now_used_s, now_s
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                await self._answered.wait()
            await asyncio.sleep(PLAN_EVERY_S)
            # A leader that stops reading costs no evidence.
            await self.outbox.idle.wait()

    def _request(self, busy: float) -> policy.FollowRequest:
        known = self._settings_sender.policy
        evidence = known.evidence() if known.led else {}
        return policy.FollowRequest(
            router_id=self._router_id,
            evidence=[evidence_to_proto(key, one) for key, one in evidence.items()],
            targets=[report_to_proto(*state) for state in self._settings_sender.target_states().items()],
            busy=busy,
            epoch=self._epoch,
            reaches_store=self._leases.available,
        )

    def _received(self, message: policy.FollowResponse) -> None:
        if message.epoch < self._epoch:
            raise StreamEnded("a former leader, which does not know yet that another one leads")
        self._epoch = message.epoch
        self._take(message.decisions)
        self._answered.set()

    def _ended(self, why: Exception | None) -> None:
        self._settings_sender.policy.lost(asyncio.get_running_loop().time())

    def _take(self, decisions: Any) -> None:
        # Decisions carry wall-clock times; this router uses the loop's clock.
        clock_s = asyncio.get_running_loop().time() - time.time()
        removed = [Cell(one.tenant, one.target) for one in decisions if one.removed]
        decided = dict(decision_from_proto(one, clock_s=clock_s) for one in decisions if not one.removed)
        if not self._answered.is_set():
            # The first answer has every decision. What it lacks of a target was removed while this router was away.
            targets = {cell.target for cell in decided}
            removed += [cell for cell in self._followed if cell.target in targets and cell not in decided]
        self._followed.difference_update(removed)
        self._followed.update(decided)
        sums = [known for one in decisions for known in sums_from_proto(one)]
        self._settings_sender.policy.forget(removed)
        self._settings_sender.policy.follow(decided, sums)
        self._settings_sender.plan_changed({*removed, *decided})
        self._tried.set()
