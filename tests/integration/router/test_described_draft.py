"""`outrider describe draft`, against a control plane, a router and fake workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fakes import FakeDraft
from tests.integration.router.conftest import Cluster, Fleet, soon


def test_a_draft_is_described_with_its_rollout_if_it_has_one(cluster: Cluster, outrider: Callable[..., Any]) -> None:
    async def start(fleet: Fleet) -> None:
        await fleet.draft(FakeDraft(model="old"))
        await fleet.draft(FakeDraft(model="new", candidate=True))

    cluster.within(start)
    soon(lambda: len(outrider("get", "drafts", "-o", "json")["drafts"]) == 2)
    outrider("rollout", "start", "new", "--share", "0.2")
    described = outrider("describe", "draft", "new", "-o", "json")["draft"]
    assert (described["name"], described["stage"], described["recipe"]) == ("new", described["rollout_state"], None)
    assert described["rollout_share"] == 0.2
    assert "rollout_state" not in outrider("describe", "draft", "old", "-o", "json")["draft"]
    assert "Rollout share:" in outrider("describe", "draft", "new")
    assert "nobody" in outrider("describe", "draft", "nobody", code=3)
