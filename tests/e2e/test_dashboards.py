"""A real Prometheus that scrapes a real stack: every panel has data, and no alert fires while all is well."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.up.stack import Stack

from benchmarks.support.asking import make_request
from tests.ports import free_port
from tests.unit.deploy.test_monitoring import DASHBOARDS, MONITORING, choices, panels, rules

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the binary of Prometheus"),
]

# Dashboard, panel and query: each begins with the first event of its kind, of which a healthy stack has none.
_OF_FAULTS = {
    (
        "fleet",
        "Requests moved, per minute",
        '60 * sum by (role) (rate(outrider_failover_total{namespace=~".*"}[1m]))',
    ),
    (
        "fleet",
        "Requests moved, per minute",
        '60 * sum by (kind) (rate(outrider_gateway_router_failovers_total{namespace=~".*"}[1m]))',
    ),
    (
        "requests",
        "Failures per second",
        'sum by (reason) (rate(outrider_request_failure_total{namespace=~".*"}[1m]))',
    ),
    (
        "requests",
        "Refused per second",
        'sum by (tenant, reason) (rate(outrider_admission_rejected_total{namespace=~".*"}[1m]))',
    ),
    (
        "speculation",
        "Requests that went on without a draft, per minute",
        '60 * sum by (reason) (rate(outrider_fallback_total{namespace=~".*"}[1m]))',
    ),
    (
        "tenants",
        "Refused before any token, per second",
        'sum by (tenant, reason) (rate(outrider_admission_rejected_total{namespace=~".*",tenant=~".*"}[1m]))',
    ),
    (
        "tenants",
        "Refused for a quota, per second",
        'sum by (tenant, quota) (rate(outrider_quota_rejected_total{namespace=~".*",tenant=~".*"}[1m]))',
    ),
    (
        "tenants",
        "Requests whose last 200 drafted tokens were mostly wrong, per minute",
        '60 * sum by (tenant) (rate(outrider_low_acceptance_total{namespace=~".*",tenant=~".*"}[1m]))',
    ),
    (
        "tenants",
        "Alerts that are up",
        'max by (tenant, alert, model_name) (outrider_alert_active{namespace=~".*",tenant=~".*"})',
    ),
}
# The operator of a cluster adds it to every series; without one nothing has it.
_OF_CLUSTERS = "namespace"
_SCRAPES_S, _SIZED_S = 12.0, 100.0


@asynccontextmanager
async def prometheus(directory: Path, targets: Path, rule_file: Path = MONITORING / "rules.yaml") -> AsyncIterator[str]:
    """Its base URL, once it answers."""
    address = f"127.0.0.1:{free_port()}"
    scrape = {"job_name": "outrider", "file_sd_configs": [{"files": [str(targets)]}]}
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(yaml.safe_dump({**config, "rule_files": [str(rule_file)]}))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={address}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            while not await _answers(f"http://{address}/-/ready"):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        await process.wait()


async def _answers(url: str) -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(url)).status_code == 200
        except httpx.TransportError:
            return False


async def ask(client: httpx.AsyncClient, query: str) -> list[dict[str, Any]]:
    response = await client.get("/api/v1/query", params={"query": query})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]["result"]
    return found


async def label_values(client: httpx.AsyncClient, series: str, label: str) -> list[str]:
    """What a dashboard lets its reader choose from."""
    response = await client.get(f"/api/v1/label/{label}/values", params={"match[]": series})
    assert response.status_code == 200, response.text
    found: list[str] = response.json()["data"]
    return found


async def test_every_panel_has_data_and_no_alert_fires_on_a_healthy_stack(
    stack: Stack, gateway: Gateway, tmp_path: Path
) -> None:
    async with (
        prometheus(tmp_path, stack.scrape_file) as url,
        httpx.AsyncClient(base_url=url, timeout=30.0) as client,
    ):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        # The control plane sizes the pools after its first minute.
        while loop.time() < began_s + _SCRAPES_S or not await ask(client, "outrider_draft_pool_utilization"):
            assert loop.time() < began_s + _SIZED_S
            request = make_request(stack.config.model, "Count from one to ten.", "auto", max_tokens=24)
            await gateway.answer(request, timeout_s=60.0)
        up = await ask(client, "up")
        assert {one["value"][1] for one in up} == {"1"} and len(up) >= 5
        asked = [(path.stem, *panel) for path in DASHBOARDS for panel in panels(path)]
        empty = {panel for panel in asked if not await ask(client, panel[2])}
        assert empty <= _OF_FAULTS <= set(asked)
        for path in DASHBOARDS:
            for series, label in choices(path):
                values = await label_values(client, series, label)
                assert values or label == _OF_CLUSTERS, (path.stem, series, label)
        assert await ask(client, "outrider:acceptance:ratio_rate10m")
        assert not await ask(client, 'ALERTS{alertstate="firing"}')
        listed = (await client.get("/api/v1/rules")).json()["data"]["groups"]
        states = [rule for group in listed for rule in group["rules"]]
        assert len(states) == len(rules()) and {rule["health"] for rule in states} == {"ok"}
