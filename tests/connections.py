"""Which roles of a cluster call which, as rpc/access/roles.py has it: what a network must let through."""

from __future__ import annotations

from outrider.rpc.access.roles import CALLS, Role

SERVERS: dict[str, Role] = {
    "GenerationService": Role.GATEWAY,
    "RouterService": Role.ROUTER,
    "TraceService": Role.ROUTER,
    "AttachService": Role.ROUTER,
    "TargetService": Role.TARGET,
    "DraftService": Role.DRAFT,
    "PolicyService": Role.CONTROL,
    "ControlService": Role.CONTROL,
}
"""The roles that serve each service."""


def connections() -> frozenset[tuple[Role, Role]]:
    """(caller, server): the connections that a network must allow, in addition to those of every process to Redis."""
    calls = ((SERVERS[method.split("/")[1].rpartition(".")[2]], access) for method, access in CALLS.items())
    return frozenset((caller, server) for server, access in calls for caller in access.roles)
