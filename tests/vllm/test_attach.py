"""The plugin in vLLM's own server, attached to a router: plan, settings, trace and bill, and an answer whose router
is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm.cluster import ROUTER, Cluster, answering, clustered
from tests.vllm.test_serve import await_drafts, drafted
from tests.vllm.vllm_serve import LONG, REPETITIVE, Server, plugin, serving, streamed, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

_SOME, _MANY = 40, 300
"""Output tokens in which a setting can be seen, and in which it has to hold."""


@pytest.fixture(scope="module")
def cluster(tiny_served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with clustered(tmp_path_factory.mktemp("redis"), tiny_served) as made:
        # On a machine with other work the plan may find that drafts do not pay.
        for tenant in ("default", "gold"):
            made.ask("set", "speculation", tenant, "on")
        yield made


@pytest.fixture(scope="module")
def server(tiny_served: Path, cluster: Cluster) -> Iterator[Server]:
    tenants = {"off": {"max_draft_tokens": 0}}
    config: dict[str, Any] = {"row_price": 0, "tenant_header": "x-tenant", "tenants": tenants, "lookups": ["suffix"]}
    with serving(tiny_served, *plugin(routers=[cluster.router_address], **config)) as made:
        await_drafts(made)
        yield made


def test_it_is_a_target_with_drafts_traces_and_bills(server: Server, cluster: Cluster) -> None:
    (worker,) = until(lambda: cluster.workers("target"))
    assert (worker["status"], worker["engine"], worker["model"]) == ("attached", "vllm", "m")
    assert worker["address"] == cluster.router_address
    body = {"model": "m", "prompt": REPETITIVE, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    asked = 0

    def drafted_trace() -> Any:
        """None where the answer was over before a draft came, as it may be on a busy machine."""
        nonlocal asked
        asked += 1
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-tenant": "gold"}, timeout=1200).json()
        # The router is told of an answer while the client has it already.
        (trace,) = until(lambda: cluster.traces(reply["id"]))
        assert (trace["tenant"], trace["model"], trace["output_tokens"]) == ("gold", "m", 40)
        assert trace["prompt_tokens"] == reply["usage"]["prompt_tokens"]
        return trace if trace["accepted"] else None

    until(drafted_trace)
    assert until(lambda: [one for one in cluster.ask("explain", "gold")["targets"] if one["target"] == "m"])

    def bill() -> Any:
        """None until the whole of it is written, which is done every few seconds."""
        rows = [row for row in cluster.ask("get", "usage", "gold")["usage"] if row["output_tokens"] == 40 * asked]
        return rows and rows[0]

    billed = until(bill)
    assert billed["requests"] == asked and billed["accepted_tokens"] > 0 and billed["target_useful_s"] > 0


def test_what_it_remembers_of_a_tenant_is_erased(server: Server, cluster: Cluster) -> None:
    for tenant in ("forgotten", "kept"):
        server.answer(REPETITIVE, tenant=tenant, **LONG)
    # No request runs: nothing is scheduled, and the erasure does not wait for the next one.
    for count in (1, 0):
        erased = cluster.ask("delete", "history", "forgotten", "--yes")
        assert (erased["num_texts"], erased["unreachable_targets"]) == (count, [])
    assert cluster.ask("delete", "history", "kept", "--yes")["num_texts"] == 1


def test_settings_hold_for_running_requests(server: Server, cluster: Cluster) -> None:
    """On, off, capped, and by the plan again, while one answer runs after another."""

    def per_step(tokens: int) -> float:
        """Drafted tokens of a step that had any; 0 without."""
        found = server.verified(tokens)
        return found.drafted / found.steps if found.steps else 0.0

    def reason() -> str:
        found: list[str] = [one["reason"] for one in cluster.ask("explain", "live")["targets"] if one["target"] == "m"]
        return found[0] if found else ""

    with answering(server, "live"):
        cluster.ask("set", "speculation", "live", "on")
        until(lambda: per_step(_SOME) > 2)
        cluster.ask("set", "speculation", "live", "off")
        until(lambda: not server.verified(_SOME).drafted)
        assert not server.verified(_MANY).drafted
        cluster.ask("set", "speculation", "live", "on", "--max-draft-tokens", "2")
        until(lambda: 0 < per_step(_SOME) <= 2)
        assert per_step(_MANY) <= 2
        assert reason().startswith("operator")
        cluster.ask("set", "speculation", "live", "auto")
        # Whether drafts pay on a machine with other work is the plan's to say.
        until(lambda: not reason().startswith("operator"))
    assert not drafted(server, lambda: server.answer(REPETITIVE, tenant="off", **LONG))


def test_an_answer_outlives_its_router_and_the_next_one_is_attached_to(server: Server, cluster: Cluster) -> None:
    wanted = server.answer(REPETITIVE, tenant="off", **LONG)
    accepted: list[float] = []

    def kill_router() -> None:
        cluster.kill(ROUTER)
        accepted.append(server.counted("num_accepted_tokens"))

    assert streamed(server, kill_router) == wanted
    assert server.counted("num_accepted_tokens") > accepted[0], "the draft goes on without the router"
    assert server.answer(REPETITIVE, **LONG) == wanted
    cluster.start_router()
    (worker,) = until(lambda: [one for one in cluster.workers("target") if one["status"] == "attached"])
    assert worker["address"] == cluster.router_address
    await_drafts(server)
    assert server.answer(REPETITIVE, **LONG) == wanted
