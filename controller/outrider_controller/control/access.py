"""Who may use the operator's API: whoever has an operator's certificate or token, or an API key with scope admin."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import Unauthenticated
from outrider.gateway.auth import KeyGuard
from outrider.rpc.roles import ANYBODY, NO_ROLES, Access, Caller, Role, RoleGuard


@dataclass(frozen=True, slots=True)
class OperatorGuard:
    """Without certificates and a cluster secret everybody who reaches the port is an operator: it is for one machine
    then."""

    cluster: RoleGuard
    keys: KeyGuard

    async def admit(self, access: Access, token: str, roles: frozenset[Role] = NO_ROLES) -> Caller:
        if not self.cluster.asks:
            return ANYBODY
        # With a certificate of whatever role, an API key opens what that role does not.
        if not roles.isdisjoint(access.roles) or (roles and not token) or self.cluster.roles_of(token):
            return await self.cluster.admit(access, token, roles)
        if not token:
            message = "no credential: set OUTRIDER_OPERATOR_TOKEN, to the operator's token or an API key for admins"
            raise Unauthenticated(message, reason="NO_CREDENTIAL")
        return await self.keys.admit(access, token)
