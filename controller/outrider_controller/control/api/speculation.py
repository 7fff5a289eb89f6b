"""The operators' calls on a tenant's speculation: set and explain. Each field is checked here."""

from __future__ import annotations

import time

from outrider.errors import InvalidRequest
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.metadata.plans import PlanStore
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import tenants_pb2 as tenants

from outrider_controller.control.api.releases import Releases
from outrider_controller.control.api.tenants import caller, check_name
from outrider_controller.control.plan.leading import PlanLeader

_MAX_TTL_MS = 366 * 86_400_000


class SpeculationCalls:
    def __init__(self, store: PlanStore, leader: PlanLeader, releases: Releases) -> None:
        self._store = store
        self._leader = leader
        self._releases = releases

    async def SetSpeculation(self, request: control.SetSpeculationRequest, _: object) -> control.SetSpeculationResponse:
        """Writes an override and returns it. Raises InvalidRequest; NotFound for an undefined tenant where others are
        defined; Unavailable when it cannot be written.
        """
        check_name("tenant", request.tenant)
        if request.setting not in tenants.SpeculationSetting.values() or not request.setting:
            raise InvalidRequest("setting", f"{request.setting} is none of on, off and auto")
        capped = request.HasField("max_draft_tokens")
        if capped and not 1 <= request.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidRequest("max_draft_tokens", f"{request.max_draft_tokens} is not from 1 to {MAX_DRAFT_TOKENS}")
        if request.ttl_ms > _MAX_TTL_MS:
            raise InvalidRequest("ttl_ms", f"{request.ttl_ms} is longer than a year")
        override = tenants.SpeculationOverride(
            setting=request.setting,
            max_draft_tokens=request.max_draft_tokens if capped else None,
            until_unix_ms=round(time.time() * 1000) + request.ttl_ms if request.ttl_ms else 0,
            by=caller(),
        )
        nothing = request.setting == tenants.SPECULATION_SETTING_AUTO and not capped
        await self._store.set_override(request.tenant, None if nothing else override)
        return control.SetSpeculationResponse(override=override)

    async def Explain(self, request: control.ExplainRequest, _: object) -> control.ExplainResponse:
        """Raises InvalidRequest; Unavailable where another control plane leads and its decisions cannot be read."""
        check_name("tenant", request.tenant)
        decisions, known = await self._leader.explain(request.tenant)
        rollouts = await self._releases.covering(request.tenant)
        return control.ExplainResponse(decisions=decisions, known=known, rollouts=rollouts)
