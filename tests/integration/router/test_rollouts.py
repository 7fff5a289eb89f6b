"""Rollouts of drafts, as an operator starts and ends them and as their evidence does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from outrider_controller.plan_messages import draft_version
from outrider_controller.router.config import PolicyConfig

from tests.fakes import FakeDraft, FakeTarget, serving_draft
from tests.integration.router.conftest import Cluster, Fleet, soon

Outrider = Callable[..., Any]


@dataclass(slots=True)
class Drafts:
    old: FakeDraft
    new: FakeDraft

    @property
    def num_opens(self) -> tuple[int, int]:
        return len(self.old.opens), len(self.new.opens)


async def started(fleet: Fleet, *, old: float = 0.8, new: float = 0.8, step_s: float = 0.004) -> Drafts:
    """Two drafts by their accuracies, the new one a candidate."""
    await fleet.target(FakeTarget(step_s=step_s))
    drafts = Drafts(
        await fleet.draft(FakeDraft(accuracy=old, model="old")),
        await fleet.draft(FakeDraft(accuracy=new, model="new", candidate=True)),
    )
    # Requests with `speculation: on` wait so long for a draft: less than a step.
    await fleet.start(policy=PolicyConfig(max_wait_us=round(5e5 * step_s)))
    return drafts


async def ask(fleet: Fleet, count: int, first: int = 0, max_new_tokens: int = 12) -> None:
    """Requests with different ids, all at the same time."""
    numbered = (f"r{number}" for number in range(first, first + count))
    await asyncio.gather(
        *(fleet.ask(fleet.request(request_id=one, max_new_tokens=max_new_tokens), timeout=60) for one in numbered)
    )


def stages(outrider: Outrider) -> dict[str, str]:
    return {row["name"]: row["stage"] for row in outrider("get", "drafts", "-o", "json")["drafts"]}


def test_a_candidate_drafts_for_nobody_until_a_rollout_gives_it_requests(cluster: Cluster, outrider: Outrider) -> None:
    drafts = cluster.within(started)
    # Whatever drafts save on this machine.
    outrider("set", "speculation", "t", "on")
    cluster.within(lambda fleet: ask(fleet, 30))
    assert drafts.num_opens == (30, 0)
    soon(lambda: stages(outrider) == {"new": "candidate", "old": "released"})

    assert "no draft 'nobody' was seen" in outrider("rollout", "start", "nobody", code=3)
    assert "start its workers with --candidate" in outrider("rollout", "start", "old", code=2)
    assert "was never rolled out" in outrider("rollout", "undo", "new", code=3)
    told = outrider("rollout", "start", "new", "--share", "0.5")
    assert f"rollout of {draft_version(drafts.new.info)}: running, 50.0% of the requests of all tenants" in told
    assert stages(outrider)["new"] == "running"

    def both_draft() -> bool:
        before = drafts.num_opens
        cluster.within(lambda fleet: ask(fleet, 20))
        return all(now > then for now, then in zip(drafts.num_opens, before, strict=True))

    soon(both_draft)
    assert "undone" in outrider("rollout", "undo", "new")
    assert "stop them first" in outrider("delete", "draft", "new", "--yes", code=2)

    def only(which: int) -> bool:
        before = drafts.num_opens
        cluster.within(lambda fleet: ask(fleet, 20))
        return [now - then for now, then in zip(drafts.num_opens, before, strict=True)][1 - which] == 0

    soon(lambda: only(0))
    assert "promoted" in outrider("rollout", "promote", "new")
    soon(lambda: drafts.num_opens[1] > 0 and stages(outrider)["new"] == "promoted")
    actions = [entry["action"] for entry in outrider("get", "audit", "-o", "json")["audit"]]
    assert actions == ["promote rollout", "undo rollout", "start rollout", "set speculation"]


def test_requests_under_way_leave_a_candidate_that_is_taken_back(cluster: Cluster, outrider: Outrider) -> None:
    running: list[asyncio.Task[Any]] = []

    async def begin(fleet: Fleet) -> None:
        requests = [fleet.request(request_id=f"long{number}", max_new_tokens=4080) for number in range(12)]
        running.extend(asyncio.create_task(fleet.ask(one, timeout=100)) for one in requests)

    async def stop(fleet: Fleet) -> None:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    drafts = cluster.within(lambda fleet: started(fleet, step_s=0.05))
    soon(lambda: "new" in stages(outrider))
    outrider("set", "speculation", "t", "on")
    outrider("rollout", "start", "new", "--share", "0.5")
    soon(lambda: outrider("explain", "t", "-o", "json")["rollouts"] != [])

    def with_both() -> bool:
        cluster.within(stop)
        running.clear()
        cluster.within(begin)
        return bool(drafts.new.live)

    soon(with_both, within_s=40)
    outrider("rollout", "undo", "new")
    soon(lambda: not drafts.new.live, within_s=60)
    assert not any(task.done() for task in running)
    cluster.within(stop)


@pytest.mark.slow
def test_a_much_worse_candidate_is_undone_by_its_evidence_and_a_much_better_one_promoted(
    cluster: Cluster, outrider: Outrider
) -> None:
    drafts = cluster.within(lambda fleet: started(fleet, old=0.6, new=0.05, step_s=0.02))
    soon(lambda: "new" in stages(outrider))
    # Whatever drafts save on this machine.
    outrider("set", "speculation", "t", "on")
    outrider("rollout", "start", "new", "--share", "0.3", "--tenant", "t")
    asked = [0]

    def ended() -> bool:
        cluster.within(lambda fleet: ask(fleet, 40, first=asked[0], max_new_tokens=40))
        asked[0] += 40
        return stages(outrider)["new"] != "running"

    soon(ended, within_s=50)
    rollout = outrider("rollout", "status", "new", "-o", "json")["rollout"]
    assert (rollout["state"], rollout["by"], rollout["tenant"]) == ("undone", "control", "t")
    assert rollout["interval"][1] < -0.02 and rollout["candidate_tokens"] <= 20_000
    (event,) = outrider("events", "--kind", "rollout_changed", "--limit", "1", "-o", "json")["events"]
    assert event["fields"]["state"] == "undone" and event["fields"]["draft"] == draft_version(drafts.new.info)
    assert "undone" in outrider("explain", "t") and outrider("explain", "other", "-o", "json")["rollouts"] == []

    drafts.new.accuracy = 0.98
    outrider("rollout", "start", "new", "--share", "0.3")
    soon(ended, within_s=50)
    assert stages(outrider)["new"] == "promoted", outrider("rollout", "status", "new")


def test_a_share_is_above_0_and_at_most_a_half(cluster: Cluster, outrider: Outrider) -> None:
    cluster.within(started)
    soon(lambda: "new" in stages(outrider))
    for share in ("0", "0.9"):
        assert "--share" in outrider("rollout", "start", "new", "--share", share, code=2)


def test_a_version_that_no_worker_runs_is_deleted_with_its_rollout(cluster: Cluster, outrider: Outrider) -> None:
    async def begin(fleet: Fleet) -> AsyncExitStack:
        worker = AsyncExitStack()
        gone = await worker.enter_async_context(serving_draft(FakeDraft(model="gone", candidate=True)))
        await worker.enter_async_context(fleet.store.register(gone.info, gone.address, lambda: gone.load))
        return worker

    worker = cluster.within(begin)
    soon(lambda: "gone" in stages(outrider))
    outrider("rollout", "start", "gone")
    cluster.within(lambda fleet: worker.aclose())
    soon(lambda: outrider("get", "drafts", "-o", "json")["drafts"][0]["workers"] == 0)
    assert outrider("delete", "draft", "gone", "--yes", "-o", "json")["drafts"][0].startswith("gone@")
    assert stages(outrider) == {} and "no draft 'gone' was seen" in outrider("delete", "draft", "gone", "--yes", code=3)
    assert outrider("explain", "t", "-o", "json")["rollouts"] == []
    assert outrider("get", "audit", "-o", "json")["audit"][0]["action"] == "delete draft"
    # The leader has forgotten it too: a worker that comes back is a new version.
    cluster.within(lambda fleet: fleet.draft(FakeDraft(model="gone", candidate=True)))
    soon(lambda: stages(outrider) == {"gone": "candidate"})
