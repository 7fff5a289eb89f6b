"""Kills workers of a stack on this machine while it serves. Their supervisor restarts them."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc
from outrider.rpc.access.roles import bearer
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2
from outrider_controller.cli.clusters.contexts import operator_token

from loadtest.settings import Faults

log = logging.getLogger(__name__)

_ROLES = {
    "target": worker_pb2.WORKER_ROLE_TARGET,
    "draft": worker_pb2.WORKER_ROLE_DRAFT,
    "router": worker_pb2.WORKER_ROLE_ROUTER,
}

ListWorkers = Callable[[worker_pb2.WorkerRole.ValueType], Sequence[control_pb2.WorkerStatus]]


class Killer:
    """Kills one worker per call, of each role in turn, like a crash."""

    def __init__(self, faults: Faults, workers: ListWorkers, kill: Callable[[int, int], None] = os.kill) -> None:
        self._roles = itertools.cycle(faults.roles)
        self._workers = workers
        self._kill = kill
        self.killed: list[str] = []
        """Role and id of each killed worker."""

    def strike(self) -> None:
        role = next(self._roles)
        # The pid in a lease of another machine belongs to that machine.
        here = [
            one for one in self._workers(_ROLES[role]) if one.pid and one.address.startswith(("127.", "localhost:"))
        ]
        if not here:
            log.warning("no %s to kill on this machine", role)
            return
        worker = random.choice(here)
        with suppress(ProcessLookupError):
            self._kill(worker.pid, signal.SIGKILL)
            self.killed.append(f"{role} {worker.info.worker_id}")
            log.warning("killed %s %s", role, worker.info.worker_id)


def workers_of(control: str) -> ListWorkers:
    """Lists workers from the control plane; none if it does not answer."""
    stub = control_pb2_grpc.ControlServiceStub(grpc.insecure_channel(control))

    def ask(role: worker_pb2.WorkerRole.ValueType) -> Sequence[control_pb2.WorkerStatus]:
        request = control_pb2.ListWorkersRequest(role=role)
        try:
            return stub.ListWorkers(request, timeout=5.0, metadata=bearer(operator_token(control))).workers
        except grpc.RpcError as error:
            log.warning("the control plane names no workers: %s", error)
            return ()

    return ask
