"""Access to the operators' API: with an operator's certificate or token, or an API key with scope admin."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import Unauthenticated
from outrider.gateway.tenants.auth import KeyGuard
from outrider.rpc.access.roles import ANYBODY, NO_ROLES, Access, Caller, Role, RoleGuard


@dataclass(frozen=True, slots=True)
class OperatorGuard:
    """Checks callers. Without certificates and a cluster secret every client of the port is an operator, which is meant
    for a single machine."""

    cluster: RoleGuard
    keys: KeyGuard

    async def admit(self, access: Access, token: str, roles: frozenset[Role] = NO_ROLES) -> Caller:
        if not self.cluster.asks:
            return ANYBODY
        # With a certificate of any role, an API key can still give access that the role does not.
        if not roles.isdisjoint(access.roles) or (roles and not token) or self.cluster.roles_of(token):
            return await self.cluster.admit(access, token, roles)
        if not token:
            message = "no credential: set OUTRIDER_OPERATOR_TOKEN, to the operator's token or an API key for admins"
            raise Unauthenticated(message, reason="NO_CREDENTIAL")
        return await self.keys.admit(access, token)
