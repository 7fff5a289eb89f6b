"""The operator's commands against a control plane, a router and fake workers, as somebody types them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from outrider.rpc.v1 import tenants_pb2
from outrider.rpc.v1.router_pb2 import SPECULATION_MODE_ON

from tests.fakes import FakeDraft, FakeTarget
from tests.integration.router.conftest import Cluster, Fleet, soon


def test_a_worker_that_comes_and_one_that_is_stopped_are_events(cluster: Cluster, outrider: Callable[..., Any]) -> None:
    async def come_and_go(fleet: Fleet) -> str:
        async with AsyncExitStack() as stack, asyncio.timeout(60):
            worker_id = (await Fleet(fleet.store, stack).target()).info.worker_id
            while worker_id not in {event.fields.get("worker_id") for event in await fleet.store.events()}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            return worker_id

    worker_id = cluster.within(come_and_go)

    def told() -> list[str]:
        found = outrider("events", "--worker", worker_id, "-o", "json")["events"]
        return [event["kind"] for event in found]

    soon(lambda: told() == ["worker_joined", "worker_left"])
    line = outrider("events", "--worker", worker_id, "--kind", "worker_left").splitlines()
    assert len(line) == 1 and f"worker_left           worker_id={worker_id} address=127.0.0.1:" in line[0]
    assert outrider("events", "--limit", "0") == ""
    assert "--kind" in outrider("events", "--kind", "nonsense", code=2)


def test_a_worker_is_cordoned_drained_and_taken_back(cluster: Cluster, outrider: Callable[..., Any]) -> None:
    async def start(fleet: Fleet) -> str:
        return (await fleet.target()).info.worker_id

    worker_id = cluster.within(start)

    def listed() -> tuple[str, str]:
        (row,) = outrider("get", "workers", worker_id, "-o", "json")["workers"]
        return row["status"], row["reason"]

    assert listed() == ("ready", "")
    assert outrider("cordon", worker_id, "--reason", "new fan") == f"{worker_id} is cordoned; no sequences there\n"
    assert listed() == ("cordoned", "new fan")
    assert "draining" in outrider("drain", worker_id, "--no-wait", "-o", "json")["worker"]["status"]
    assert "is drained" in outrider("drain", worker_id, "--timeout", "1m")
    assert listed() == ("drained", "new fan")
    assert "takes work again" in outrider("uncordon", worker_id)
    assert "was not cordoned" in outrider("uncordon", worker_id)
    assert listed() == ("ready", "")
    assert "no worker 'nobody'" in outrider("cordon", "nobody", code=3)
    assert "--grace" in outrider("drain", worker_id, "--grace", "soon", code=2)
    assert "not drained yet" in outrider("drain", worker_id, "--timeout", "0s", code=6)


def test_running_requests_are_listed_described_summed_and_traced_through_the_control_plane(
    cluster: Cluster, outrider: Callable[..., Any]
) -> None:
    running: list[asyncio.Task[Any]] = []

    async def start(fleet: Fleet) -> tuple[str, str]:
        target, draft = await fleet.target(FakeTarget(step_s=0.03)), await fleet.draft(FakeDraft(accuracy=1.0))
        await fleet.start()
        await fleet.store.tenants.put([tenants_pb2.Tenant(name="acme")], by="test")
        ended = fleet.request(max_new_tokens=20, tenant="acme", request_id="ended")
        await fleet.ask(ended)
        more = {"tenant": "acme", "request_id": "long", "speculation": SPECULATION_MODE_ON, "max_draft_tokens": 1}
        request = fleet.request(max_new_tokens=4000, **more)
        running.append(asyncio.create_task(fleet.ask(request, timeout=100)))
        async with asyncio.timeout(60):
            while not draft.live:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return target.info.worker_id, draft.info.worker_id

    async def stop(fleet: Fleet) -> None:
        running[0].cancel()
        await asyncio.gather(*running, return_exceptions=True)

    target, draft = cluster.within(start)
    (row,) = outrider("get", "sequences", "-o", "json")["sequences"]
    assert (row["id"], row["tenant"], row["target"], row["draft"]) == ("long", "acme", target, draft)
    assert outrider("get", "sequences", "--worker", draft, "-o", "name") == "long\n"
    assert outrider("get", "sequences", "--tenant", "other", "-o", "name") == ""
    soon(lambda: outrider("get", "sequences", "-o", "json")["sequences"][0]["acceptance"] == 1.0)

    described = outrider("describe", "worker", target, "-o", "json")
    assert described["worker"]["role"] == "target" and described["num_sequences"] == 1
    assert outrider("describe", "worker", target).split()[:2] == ["ID:", target]
    described = outrider("describe", "tenant", "acme", "-o", "json")
    assert (described["tenant"]["running"], described["tenant"]["ended"]) == (1, 1)
    assert "long" in outrider("describe", "tenant", "acme")
    assert outrider("describe", "tenant", "default").endswith("Sequences: 0\nEvents: none\n")
    assert "nobody" in outrider("describe", "tenant", "nobody", code=3)
    assert "no key nobody" in outrider("describe", "key", "nobody", code=3)

    assert outrider("get", "sequence", "long", "-o", "name") == "long\n"
    assert "no sequence nothing" in outrider("get", "sequences", "nothing", code=3)
    assert outrider("describe", "workers", draft, "-o", "yaml").startswith("schema: outrider/worker-description/v1\n")
    described = outrider("describe", "sequence", "long", "-o", "json")
    assert (described["sequence"]["state"], described["sequence"]["target"]) == ("running", target)
    assert {move["worker"] for move in described["moves"]} == {target, draft}
    assert ["State:", "length"] in [
        line.split() for line in outrider("describe", "sequence", "chatcmpl-ended").splitlines()
    ]
    assert "nothing" in outrider("describe", "sequence", "nothing", code=3)

    found = outrider("top", "--interval", "0.5", "-o", "json")
    (tenant,) = found["tenants"]
    assert tenant["tenant"] == "acme" and tenant["tokens_per_s"] > 0 and tenant["acceptance"] == 1.0
    soon(lambda: outrider("top", "--interval", "0.2", "-o", "json")["tenants"][0]["mode"] == ["on"])
    by_worker = {one["worker"]: one for one in found["workers"]}
    assert by_worker[target]["tokens_per_s"] > 0 and by_worker[draft]["verified_per_s"] > 0
    assert "1 request under way, 2 workers" in outrider("top", "--interval", "0.2")

    (part,) = outrider("trace", "ended", "-o", "json")["traces"]
    assert part["request_id"] == "ended" and part["output_tokens"] == 20
    assert "UNKNOWN_REQUEST" in outrider("trace", "nothing", "-o", "json", code=3)
    cluster.within(stop)


def test_a_text_that_is_always_guessed_raises_an_alert(cluster: Cluster, outrider: Callable[..., Any]) -> None:
    async def start(fleet: Fleet) -> None:
        await fleet.target(FakeTarget(step_s=0.002))
        await fleet.draft(FakeDraft(accuracy=1.0))
        await fleet.start()

    async def ask(fleet: Fleet) -> None:
        await fleet.ask(fleet.request(max_new_tokens=1300, tenant="acme", speculation=SPECULATION_MODE_ON), timeout=60)

    def alerts() -> list[str]:
        found = outrider("events", "--kind", "alert_raised", "--tenant", "acme", "-o", "json")["events"]
        return [event["fields"]["alert"] for event in found]

    def raised() -> bool:
        # Again on a machine so busy that few drafts come in time.
        cluster.within(ask)
        return "output_loops" in alerts()

    cluster.within(start)
    soon(raised)
    assert alerts().count("output_loops") == 1
