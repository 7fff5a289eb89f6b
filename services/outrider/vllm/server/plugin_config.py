"""What the plugin in `vllm serve` is told: `--additional-config '{"outrider": {...}}'`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from outrider.address import check_address
from outrider.drafting.lookup import ngram, suffix

CONFIG = "outrider"
"""Key in vLLM's additional_config."""
_HEX_DIGEST = r"^[0-9a-f]{64}$"
TENANT, MAX_DRAFT_TOKENS = "outrider_tenant", "max_draft_tokens"
"""In a request's `vllm_xargs`: its tenant, which the middleware writes, and a lower cap, which a client may ask for."""
LOOKUPS = (ngram.NAME, suffix.NAME)
"""Kinds of lookups. A prediction of the client does not reach a request of vLLM."""


def _address(value: str) -> str:
    check_address("address", value)
    return value


def _lookup(value: str) -> str:
    if value not in LOOKUPS:
        raise ValueError(f"there are {', '.join(LOOKUPS)}")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TenantConfig(_Strict):
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most drafted tokens in one step of each request; 0 for none. None: that of the plugin."""
    keys: tuple[Annotated[str, Field(pattern=_HEX_DIGEST)], ...] = ()
    """SHA-256 of its API keys, in hex."""


class PluginConfig(_Strict):
    drafts: tuple[Annotated[str, AfterValidator(_address)], ...] = ()
    """HOST:PORT of draft workers."""
    routers: tuple[Annotated[str, AfterValidator(_address)], ...] = ()
    """HOST:PORT of routers. The server is attached to one of them, which says how requests speculate."""
    lookups: tuple[Annotated[str, AfterValidator(_lookup)], ...] = ()
    """Kinds of drafts that are looked up in this process."""
    max_draft_tokens: Annotated[int, Field(ge=0)] = 4
    """Of each request whose tenant has no number of its own."""
    row_price: Annotated[float, Field(ge=0, le=1)] | None = None
    """Least chance at which a drafted token is verified. None: by the measured times of steps."""
    tenants: Mapping[str, TenantConfig] = Field(default_factory=dict)
    tenant_header: str = ""
    """Header whose value names the tenant. Only for servers that nobody reaches but through what sets it."""
    tls_dir: str = ""
    secret_file: str = ""
    """As of a target: for draft workers that serve only processes of their cluster."""

    @classmethod
    def of(cls, additional_config: Any) -> Self:
        """Raises ValueError that names each field at fault."""
        given = additional_config.get(CONFIG, {}) if isinstance(additional_config, Mapping) else {}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ValueError("; ".join(_error_line(each) for each in error.errors())) from None

    def cap_of(self, tenant: str) -> int:
        found = self.tenants.get(tenant)
        return self.max_draft_tokens if found is None or found.max_draft_tokens is None else found.max_draft_tokens

    @property
    def caps(self) -> dict[str, int]:
        """By tenant; the empty name is all others'."""
        return {"": self.max_draft_tokens, **{name: self.cap_of(name) for name in self.tenants}}

    def tenant_with(self, key: str) -> str:
        """The tenant with this API key; empty without one."""
        digest = hashlib.sha256(key.encode()).hexdigest()
        return next((name for name, tenant in self.tenants.items() if digest in tenant.keys), "")


def _error_line(error: Any) -> str:
    field = ".".join(("additional_config", CONFIG, *map(str, error["loc"])))
    if error["type"] == "extra_forbidden":
        return f"{field}: there is no such option"
    return f"{field}: {error['msg'].removeprefix('Value error, ')}"
