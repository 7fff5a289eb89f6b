"""Names of the keys. Everything lies under one namespace, so that a Redis can be shared."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.rpc.v1 import worker_pb2

ROLES: tuple[worker_pb2.WorkerRole.ValueType, ...] = (
    worker_pb2.WORKER_ROLE_DRAFT,
    worker_pb2.WORKER_ROLE_TARGET,
    worker_pb2.WORKER_ROLE_ROUTER,
    worker_pb2.WORKER_ROLE_GATEWAY,
    worker_pb2.WORKER_ROLE_CONTROL,
)


def role_name(role: worker_pb2.WorkerRole.ValueType) -> str:
    """draft, target, … Raises ValueError for an unset or unknown role."""
    if role not in ROLES:
        raise ValueError(f"role: {role} is not a worker's role")
    return worker_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


@dataclass(frozen=True, slots=True)
class Keys:
    namespace: str = "outrider"

    @property
    def events(self) -> str:
        """Stream."""
        return f"{self.namespace}:events"

    def workers(self, role: worker_pb2.WorkerRole.ValueType) -> str:
        """Set of the ids that have, or recently had, a lease."""
        return f"{self.namespace}:workers:{role_name(role)}"

    def lease(self, role: worker_pb2.WorkerRole.ValueType, worker_id: str) -> str:
        """A serialized WorkerStatus, which expires; empty once given back."""
        return f"{self.namespace}:lease:{role_name(role)}:{worker_id}"

    def prefix(self, role: worker_pb2.WorkerRole.ValueType, worker_id: str) -> str:
        """Set of block hashes. It expires with the lease."""
        return f"{self.namespace}:prefix:{role_name(role)}:{worker_id}"
