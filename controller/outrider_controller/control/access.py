"""Who may use the operator's API: whoever has the operator's token of this cluster, or an API key with scope admin."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import Unauthenticated
from outrider.gateway.auth import KeyGuard
from outrider.rpc.roles import ANYBODY, Access, Caller, ClusterSecret, RoleGuard


@dataclass(frozen=True, slots=True)
class OperatorGuard:
    """Without a cluster secret everybody who reaches the port is an operator: it is for one machine then."""

    secret: ClusterSecret | None
    keys: KeyGuard

    async def admit(self, access: Access, token: str) -> Caller:
        if self.secret is None:
            return ANYBODY
        if self.secret.role_of(token) is not None:
            return await RoleGuard(self.secret).admit(access, token)
        if not token:
            message = "no credential: set OUTRIDER_OPERATOR_TOKEN, to the operator's token or an API key for admins"
            raise Unauthenticated(message, reason="NO_CREDENTIAL")
        return await self.keys.admit(access, token)
