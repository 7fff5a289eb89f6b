"""Which adapter a sequence drafts with: that of its tenant, and no other."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from outrider.engine import Engine
from outrider.engine.models.adapters import Adapter, is_adapter, read_adapter

log = logging.getLogger(__name__)

_LOOK_S = 1.0


class TenantAdapters:
    """Those of one engine, while their files are there: what is erased with a tenant's samples is forgotten here."""

    def __init__(self, engine: Engine, paths: Mapping[str, Path]) -> None:
        """`paths`: by tenant. Raises CheckpointError."""
        self._engine, self._looked_s = engine, time.monotonic()
        self._paths = list(paths.values())
        self._adapters = [read_adapter(path) for path in self._paths]
        self._numbers = {tenant: number for number, tenant in enumerate(paths)}
        engine.adapt(self._adapters)

    def of(self, tenant: str) -> int:
        """Its number in the engine, or -1."""
        if self._numbers and time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            self._forget({tenant for tenant, number in self._numbers.items() if not is_adapter(self._paths[number])})
        return self._numbers.get(tenant, -1)

    def _forget(self, gone: set[str]) -> None:
        for tenant in gone:
            self._adapters[self._numbers.pop(tenant)] = Adapter()
            log.info("the adapter of %s is gone: its requests draft without one", tenant)
        if gone:
            self._engine.adapt(self._adapters)


def owned_adapters(directory: Path) -> dict[str, Path]:
    """By tenant: the adapter in a directory, or each in one of its own there. It belongs to the tenant of whose
    samples it is made, else to the one after whom its directory is named. Raises ValueError for a second one."""
    found: dict[str, Path] = {}
    for path in [directory] if is_adapter(directory) else sorted(directory.iterdir()):
        if not is_adapter(path):
            # A link to what was erased, perhaps.
            log.warning("%s: no adapter is there", path)
            continue
        tenant = _samples_of(path) or path.name
        if tenant in found:
            raise ValueError(f"adapters: {path} and {found[tenant]} are both of {tenant}")
        found[tenant] = path
    return found


def _samples_of(path: Path) -> str:
    try:
        recipe = json.loads((path / "recipe.json").read_text())
        return str(recipe["config"]["samples_of"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
