"""Operators' settings for each tenant's speculation, permanent or temporary, from the metadata store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

from outrider.errors import NotFound, Unavailable
from outrider.metadata.plans import PlanStore
from outrider.metadata.tenants.tenants import TenantStore
from outrider.rpc.v1 import tenants_pb2 as tenants

from outrider_controller.autoscaler.plan import TenantPolicy
from outrider_controller.control.plan.left_out import leaving_out
from outrider_controller.plan_messages import speculation_of, tenant_policy

_READ_TENANTS_EVERY_S = 5.0
_PAGE = 1000


class TenantPolicies:
    def __init__(self, overrides: PlanStore, records: TenantStore) -> None:
        self._store = overrides
        self._records = records
        self._set: dict[str, tenants.SpeculationPolicy] = {}
        self._overrides: dict[str, tenants.SpeculationOverride] = {}
        self._read_s = float("-inf")
        self.deleted: set[str] = set()
        """Deleted tenants, which must be dropped from the plan."""

    def outdated(self) -> None:
        """The next read reads everything."""
        self._read_s = float("-inf")

    async def read(self, now_s: float, epoch: int) -> bool:
        """Reads the settings from the store in which `epoch` leads. Returns whether any changed; what is known stays
        in force while the store is away."""
        try:
            return await self._read(now_s, epoch)
        except Unavailable:
            return False

    async def _read(self, now_s: float, epoch: int) -> bool:
        all_due = not 0 <= now_s - self._read_s < _READ_TENANTS_EVERY_S
        # First: settings that are read before a tenant's deletion would bring it back after it was dropped.
        deleted = await self._records.deleted() if all_due else set()
        overrides = await self._store.overrides(epoch)
        if overrides is None:
            return False
        changed, self._overrides = overrides != self._overrides, overrides
        if all_due:
            self._read_s, self.deleted = now_s, deleted
            found = {one.name: given async for one in self._tenants() if (given := speculation_of(one)) is not None}
            changed, self._set = changed or found != self._set or bool(self.deleted), found
        return changed

    def by_tenant(self) -> dict[str, TenantPolicy]:
        found = {}
        for name in {*self._set, *self._overrides}:
            with leaving_out(f"the settings of tenant {name}"):
                found[name] = tenant_policy(self._set.get(name), self._overrides.get(name))
        return found

    async def restore(self) -> None:
        """The store lost its data: writes again the overrides that it lacks."""
        kept = await self._store.overrides() or {}
        for tenant in self._overrides.keys() - kept.keys():
            # Tenants' records may have been applied again meanwhile, but not this tenant's.
            with suppress(NotFound):
                await self._store.set_override(tenant, self._overrides[tenant])

    async def forgotten(self) -> None:
        """The deleted tenants were dropped from the plan. While the store is away, they are dropped again."""
        with suppress(Unavailable):
            await self._records.forgotten(self.deleted)
            self.deleted = set()

    async def _tenants(self) -> AsyncIterator[tenants.Tenant]:
        after = ""
        while True:
            page, after, _ = await self._records.page(after, _PAGE)
            for tenant in page:
                yield tenant
            if not after:
                return
