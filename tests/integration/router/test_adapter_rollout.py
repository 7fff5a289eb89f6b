"""An adapter from its rollout to its erasure: workers with real models, and the commands of an operator."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outrider.samples import SampleStore
from outrider_controller.router.config import PolicyConfig

from tests.integration.router.conftest import Cluster, Fleet, real_draft, real_target, soon
from tests.unit.drafters.test_adapters import adapter, merged


@pytest.mark.slow
def test_an_adapter_is_rolled_out_to_its_tenant_taken_back_promoted_and_erased(
    cluster: Cluster, outrider: Callable[..., Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target says what the draft says with the adapter: so it is right with it, and nearly never without."""
    monkeypatch.setattr("outrider.drafters.adapters._LOOK_S", 0.0)
    store = SampleStore(tmp_path / "samples")
    made = adapter(store.work("acme", "made") / "acme-1", tiny, 1)
    (made / "recipe.json").write_text(json.dumps({"config": {"samples_of": "acme"}}))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "acme-1").symlink_to(made)
    target = Path(shutil.copytree(tiny, tmp_path / "target"))
    merged(tiny, made).save_pretrained(target)

    async def start(fleet: Fleet) -> None:
        await real_target(fleet, target)
        await real_draft(fleet, tiny, model_name="base")
        candidate = {"adapters": str(tmp_path / "adapters"), "model_name": "acme-1", "candidate": True}
        await real_draft(fleet, tiny, **candidate)
        await fleet.start(policy=PolicyConfig(max_wait_us=500_000))

    asked = [0]

    def accepted(tenant: str) -> list[float]:
        """Of each of some requests, the share of its drafted tokens."""

        async def ask(fleet: Fleet) -> list[float]:
            found = []
            for _ in range(8):
                asked[0] += 1
                name = f"r{asked[0]}"
                request = fleet.request((5, 6, 7, asked[0]), 24, request_id=name, tenant=tenant, model="tiny")
                metrics = (await fleet.ask(request, timeout=60)).metrics
                found.append(metrics.num_accepted_draft_tokens / max(1, metrics.num_draft_tokens))
            return found

        return cluster.within(ask)

    def stage() -> dict[str, str]:
        return {row["name"]: row["stage"] for row in outrider("get", "drafts", "-o", "json")["drafts"]}

    cluster.within(start)
    for tenant in ("acme", "bolt"):
        outrider("set", "speculation", tenant, "on")
    soon(lambda: stage() == {"acme-1": "candidate", "base": "released"})
    assert max(accepted("acme") + accepted("bolt")) < 0.5
    outrider("rollout", "start", "acme-1", "--share", "0.5", "--tenant", "acme")
    soon(lambda: max(accepted("acme")) > 0.9)
    assert max(accepted("bolt")) < 0.5, "only its tenant's requests have the candidate"
    outrider("rollout", "undo", "acme-1")
    soon(lambda: max(accepted("acme")) < 0.5)
    outrider("rollout", "promote", "acme-1")
    soon(lambda: max(accepted("acme")) > 0.9)
    assert max(accepted("bolt")) < 0.5, "a promoted version drafts for others without their having an adapter"
    assert outrider("describe", "draft", "acme-1", "-o", "json")["draft"]["stage"] == "promoted"
    store.erase("acme")
    soon(lambda: max(accepted("acme")) < 0.5)
    assert not made.exists()
