"""The plugin in vLLM's own server, attached to a router: plan, settings, trace and bill, and an answer whose router
is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from outrider.engine import resolve

from benchmarks.support.redis_server import EmbeddedServer
from tests.vllm.processes import free_address
from tests.vllm.test_serve import LONG, REPETITIVE, await_drafts, drafted
from tests.vllm.vllm_serve import Server, plugin, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Cluster:
    """Redis, a router, a control plane and a draft worker, each in a process of its own."""

    def __init__(self, url: str) -> None:
        self.router_address, self.control_address = free_address(), free_address()
        self._url = url
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, "--metadata", self._url, *arguments]
        self._processes[module] = subprocess.Popen(command)

    def start_router(self) -> None:
        self.start("outrider_controller.router", "--listen", self.router_address)

    def kill(self, module: str) -> None:
        process = self._processes.pop(module)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for module in list(self._processes):
            self.kill(module)

    def ask(self, *words: str) -> Any:
        """What the command line prints."""
        command = [sys.executable, "-m", "outrider_controller.cli", *words]
        done = subprocess.run(
            [*command, "--control", self.control_address, "-o", "json"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def workers(self, role: str) -> list[Any]:
        rows: list[Any] = self.ask("get", "workers", "--role", role)["workers"]
        return rows


def until(holds: Callable[[], Any], within_s: float = 120) -> Any:
    until_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until_s, "it does not come"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with EmbeddedServer.start(tmp_path_factory.mktemp("redis")) as redis:
        made = Cluster(redis.url)
        try:
            made.start_router()
            made.start("outrider_controller.control", "--listen", made.control_address)
            made.start("outrider.draft", "--listen", "127.0.0.1:0", "--model", str(model))
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def server(model: Path, cluster: Cluster) -> Iterator[Server]:
    tenants = {"off": {"max_draft_tokens": 0}}
    config: dict[str, Any] = {"row_price": 0, "tenant_header": "x-tenant", "tenants": tenants, "lookups": ["suffix"]}
    with serving(model, *plugin(routers=[cluster.router_address], **config)) as made:
        await_drafts(made)
        yield made


def test_it_is_a_target_with_drafts_traces_and_bills(server: Server, cluster: Cluster) -> None:
    (worker,) = cluster.workers("target")
    assert (worker["status"], worker["engine"], worker["model"]) == ("attached", "vllm", "m")
    assert worker["address"] == cluster.router_address
    body = {"model": "m", "prompt": REPETITIVE, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-tenant": "gold"}, timeout=300).json()
    (trace,) = cluster.ask("trace", reply["id"])["traces"]
    assert (trace["tenant"], trace["model"], trace["output_tokens"]) == ("gold", "m", 40)
    assert trace["accepted"] > 0 and trace["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    explained = cluster.ask("explain", "gold")
    assert "m" in [one["target"] for one in explained["targets"]]
    billed = until(lambda: [row for row in cluster.ask("get", "usage", "gold")["usage"] if row["output_tokens"]])
    assert [row["output_tokens"] for row in billed] == [40]
    assert billed[0]["requests"] == 1 and billed[0]["accepted_tokens"] > 0 and billed[0]["target_useful_s"] > 0


def test_what_it_remembers_of_a_tenant_is_erased(server: Server, cluster: Cluster) -> None:
    for tenant in ("forgotten", "kept"):
        server.answer(REPETITIVE, tenant=tenant, **LONG)
    # No request runs: nothing is scheduled, and the erasure does not wait for the next one.
    for count in (1, 0):
        erased = cluster.ask("delete", "history", "forgotten", "--yes")
        assert (erased["num_texts"], erased["unreachable_targets"]) == (count, [])
    assert cluster.ask("delete", "history", "kept", "--yes")["num_texts"] == 1


def test_settings_hold_for_running_requests(server: Server, cluster: Cluster) -> None:
    """Off, capped, and by the plan again, while one answer runs after another."""
    ended: list[bool] = []

    def answering() -> None:
        while not ended:
            server.answer(REPETITIVE, tenant="live", **LONG)

    def ratio() -> float:
        """Drafted tokens of a step that had any, in the next moment; 0 without."""
        before = server.counted("num_drafts"), server.counted("num_draft_tokens")
        time.sleep(1.0)
        steps = server.counted("num_drafts") - before[0]
        return (server.counted("num_draft_tokens") - before[1]) / steps if steps else 0.0

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answering)
        try:
            until(lambda: ratio() > 2)
            for words, holds in (
                (["off"], lambda: ratio() == 0),
                (["on", "--max-draft-tokens", "2"], lambda: 0 < ratio() <= 2),
                (["auto"], lambda: ratio() > 2),
            ):
                cluster.ask("set", "speculation", "live", *words)
                until(holds)
        finally:
            ended.append(True)
        running.result()
    assert not drafted(server, lambda: server.answer(REPETITIVE, tenant="off", **LONG))


def test_an_answer_outlives_its_router_and_the_next_one_is_attached_to(server: Server, cluster: Cluster) -> None:
    wanted = server.answer(REPETITIVE, tenant="off", **LONG)
    body = {"model": "m", "prompt": REPETITIVE, "temperature": 0, "stream": True} | LONG
    text, accepted = "", server.counted("num_accepted_tokens")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as reply:
        for number, line in enumerate(part for part in reply.iter_lines() if part.startswith("data: {")):
            text += json.loads(line[6:])["choices"][0]["text"]
            if number == 20:
                assert server.counted("num_accepted_tokens") > accepted
                cluster.kill("outrider_controller.router")
                accepted = server.counted("num_accepted_tokens")
    assert text == wanted
    assert server.counted("num_accepted_tokens") > accepted, "the draft goes on without the router"
    assert server.answer(REPETITIVE, **LONG) == wanted
    cluster.start_router()
    (worker,) = until(lambda: [one for one in cluster.workers("target") if one["status"] == "attached"])
    assert worker["address"] == cluster.router_address
    await_drafts(server)
    assert server.answer(REPETITIVE, **LONG) == wanted
