"""Access rights: the table of all RPCs and HTTP routes with their allowed callers, and the credentials of processes.

A server with an RPC that is not in the table does not start; `access` enforces the table. Processes of one cluster
prove their role by a certificate, or by a token derived from the cluster's secret. Clients and operators have API keys,
which the server's guard checks.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from google.protobuf import descriptor_pool

from outrider.errors import PermissionDenied, Unauthenticated
from outrider.rpc.v1 import tenants_pb2

INFER, METRICS, ADMIN = tenants_pb2.KEY_SCOPE_INFER, tenants_pb2.KEY_SCOPE_METRICS, tenants_pb2.KEY_SCOPE_ADMIN
AUTHORIZATION = "authorization"
_BEARER = "bearer "
_TOKEN_PREFIX = "outrider-"


class Role(enum.Enum):
    """The roles of the cluster's processes, and the operators."""

    GATEWAY = "gateway"
    ROUTER = "router"
    TARGET = "target"
    DRAFT = "draft"
    CONTROL = "control"
    OPERATOR = "operator"

    @property
    def dns_name(self) -> str:
        """The role's name in certificates."""
        return f"{self.value}.outrider"


@dataclass(frozen=True, slots=True)
class Access:
    """Allowed callers: processes of these roles, and API keys with one of these scopes. With neither, everybody."""

    roles: frozenset[Role] = frozenset()
    scopes: frozenset[tenants_pb2.KeyScope.ValueType] = frozenset()

    @property
    def open(self) -> bool:
        return not self.roles and not self.scopes


EVERYBODY = Access()
NO_ROLES: frozenset[Role] = frozenset()


def _roles(*roles: Role) -> Access:
    return Access(frozenset(roles))


def _service(name: str, calls: Mapping[str, Access]) -> dict[str, Access]:
    return {f"/outrider.rpc.v1.{name}/{call}": access for call, access in calls.items()}


_INFER = Access(scopes=frozenset({INFER}))
_OPERATE = Access(frozenset({Role.OPERATOR}), frozenset({ADMIN}))
_OBSERVE = Access(frozenset({Role.OPERATOR}), frozenset({ADMIN, METRICS}))
_HEALTH = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)

CALLS: dict[str, Access] = {
    **_service("GenerationService", dict.fromkeys(("Generate", "StreamGenerate", "Detokenize"), _INFER)),
    **_service("GenerationService", {"GetReceiptKey": EVERYBODY}),
    **_service("RouterService", {"RouteMany": _roles(Role.GATEWAY)}),
    **_service("RouterService", {"GetTokenizer": _roles(Role.GATEWAY, Role.CONTROL)}),
    **_service("RouterService", {"ListModels": _roles(Role.GATEWAY, Role.CONTROL, Role.OPERATOR)}),
    **_service("AttachService", {"Attach": _roles(Role.TARGET), "EraseHistory": _roles(Role.CONTROL)}),
    **_service("PolicyService", {"Follow": _roles(Role.ROUTER)}),
    **_service("TraceService", dict.fromkeys(("GetTrace", "GetActivity"), _roles(Role.CONTROL, Role.OPERATOR))),
    **_service("TraceService", {"ExportTraces": _roles(Role.CONTROL, Role.OPERATOR)}),
    **_service("TraceService", {"EraseTraces": _roles(Role.CONTROL)}),
    **_service("TargetService", dict.fromkeys(("GetInfo", "Verify", "GetTokenizer"), _roles(Role.ROUTER))),
    **_service("TargetService", {"EraseHistory": _roles(Role.CONTROL)}),
    **_service("DraftService", dict.fromkeys(("GetInfo", "Draft"), _roles(Role.TARGET))),
    **_service(
        "ControlService",
        dict.fromkeys(("ListWorkers", "GetWorker", "ListActivities", "WatchEvents", "Explain", "ListDrafts"), _OBSERVE),
    ),
    **_service(
        "ControlService",
        dict.fromkeys(
            (
                "ListTenants",
                "GetTenant",
                "PutTenants",
                "DeleteTenant",
                "DeleteHistory",
                "ListErasures",
                "DeleteVolume",
                "ListKeys",
                "ListAudit",
                "CreateKey",
                "RevokeKey",
                "CordonWorker",
                "UncordonWorker",
                "DrainWorker",
                "GetUsage",
                "ListSequences",
                "GetTrace",
                "ExportTraces",
                "SetSpeculation",
                "StartRollout",
                "EndRollout",
                "DeleteDraft",
            ),
            _OPERATE,
        ),
    ),
}
"""The methods of our services, and of vLLM's that a gateway serves. Health and reflection are open to everybody."""

ROUTES: dict[str, Access] = {
    "/v1/completions": _INFER,
    "/v1/chat/completions": _INFER,
    "/v1/responses": _INFER,
    "/v1/messages": _INFER,
    "/v1/messages/count_tokens": _INFER,
    "/tokenize": _INFER,
    "/detokenize": _INFER,
    "/version": EVERYBODY,
    "/v1/receipt-key": EVERYBODY,
    "/v1/models": _INFER,
    "/v1/models/{name:path}": _INFER,
    "/health": EVERYBODY,
    # Only with --api-metrics. Those who scrape vLLM there have no key.
    "/metrics": EVERYBODY,
}
"""The routes of the gateway's HTTP port."""


class Undeclared(Exception):
    """A call or route without an entry in the table."""


def access_to(method: str) -> Access | None:
    """The access to a gRPC method by its full name; None if it has no entry."""
    return EVERYBODY if method.startswith(_HEALTH) else CALLS.get(method)


def check_declared(services: Iterable[str]) -> None:
    """Raises Undeclared for a call of these services (full names) that the table lacks."""
    for name in services:
        try:
            service = descriptor_pool.Default().FindServiceByName(name)
        except KeyError:
            # The service has no .proto here, so its calls are refused one by one.
            continue
        for method in service.methods:
            if access_to(full := f"/{name}/{method.name}") is None:
                raise Undeclared(f"{full}: rpc/access/roles.py does not say who may call it")


def check_routes(paths: Iterable[str]) -> None:
    """Raises Undeclared for an HTTP route that the table lacks."""
    for path in paths:
        if path not in ROUTES:
            raise Undeclared(f"{path}: rpc/access/roles.py does not say who may ask for it")


@dataclass(frozen=True, slots=True, repr=False)
class ClusterSecret:
    """The shared secret of one cluster. Tokens of roles are derived from it, and none reveals another."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) < 16:
            raise ValueError("cluster_secret: less than 16 bytes")

    @classmethod
    def read(cls, path: str | Path) -> ClusterSecret:
        """Reads a file. Raises OSError; ValueError if it is too short."""
        try:
            return cls(Path(path).read_bytes().strip())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def token(self, role: Role) -> str:
        """The bearer token of a process of this role."""
        return f"{_TOKEN_PREFIX}{role.value}-{hmac.digest(self.secret, role.value.encode(), hashlib.sha256).hex()}"

    def role_of(self, token: str) -> Role | None:
        """None for a token of another cluster or an invalid one."""
        given = token.encode()
        # Compares with all of them in constant time, so that the time reveals nothing of the token.
        matching = [role for role in Role if hmac.compare_digest(self.token(role).encode(), given)]
        return matching[0] if matching else None


def credential(secret: ClusterSecret | None, role: Role) -> tuple[tuple[str, str], ...]:
    """Call metadata of a process of this role; empty if the cluster has no secret."""
    return bearer(secret.token(role)) if secret is not None else ()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Call metadata with the token; empty for an empty one."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def bearer_token(header: str | bytes | None) -> str:
    """The bearer token of an `Authorization` header; empty without one."""
    text = header.decode("latin-1") if isinstance(header, bytes) else header or ""
    return text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else ""


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    """For the audit: a role, or the id of a key. Empty if the caller was not identified."""
    tenant: tenants_pb2.Tenant | None = None
    """The tenant of a call with an API key, or of one without if gateways need none."""
    check: Callable[[], Awaitable[object]] | None = None
    """Raises like the guard's `admit` once the caller may no longer make the call. None: it always may."""

    def sharing(self, address: str) -> str:
        """The name under which it takes part in what callers share. Callers without a key are told apart by the
        addresses that they call from."""
        tenant = self.tenant.name if self.tenant is not None else ""
        return tenant if self.name else f"{tenant} {address}"


ANYBODY = Caller("")
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""Set for each call by the interceptor."""


def current_caller() -> Caller:
    """The caller of this call; to be used within a handler."""
    return CALLER.get()


class Guard(Protocol):
    """Identifies the caller and checks its access."""

    async def admit(self, access: Access, token: str, roles: frozenset[Role] = NO_ROLES) -> Caller:
        """`roles`: those in the caller's certificate. Raises Unauthenticated, PermissionDenied, or Unavailable if the
        caller cannot be checked now.
        """


@dataclass(frozen=True, slots=True)
class RoleGuard:
    """For servers inside the cluster. Without a secret and certificates, everybody who reaches the port may call."""

    secret: ClusterSecret | None = None
    certificates: bool = False
    """Whether the port accepts only callers with a certificate."""

    async def admit(self, access: Access, token: str, roles: frozenset[Role] = NO_ROLES) -> Caller:
        if not self.asks:
            return ANYBODY
        roles |= self.roles_of(token)
        if not roles:
            raise Unauthenticated(f"the call has no {self._proof} of this cluster", reason="NO_ROLE")
        names = " and ".join(sorted(role.value for role in roles))
        if roles.isdisjoint(access.roles):
            raise PermissionDenied(f"a {names} may not make this call", reason="WRONG_ROLE")
        return Caller(names)

    @property
    def asks(self) -> bool:
        return self.secret is not None or self.certificates

    def roles_of(self, token: str) -> frozenset[Role]:
        role = self.secret.role_of(token) if self.secret is not None else None
        return NO_ROLES if role is None else frozenset({role})

    @property
    def _proof(self) -> str:
        return "certificate that names a role" if self.certificates else "token"
