"""The queries of vLLM's own dashboards have data: on all our processes, and on one gateway that stands for them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import pytest
from outrider.gateway.config import GatewayConfig, HttpOptions
from outrider.gateway.server import running
from outrider_controller.cli.up.stack import Stack
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.test_dashboards import ask, label_values, prometheus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the binary of Prometheus"),
]

_TIMES = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
_BY_LENGTH = ("request_prompt_tokens", "request_generation_tokens")
_SUMS = (
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    "request_max_num_generation_tokens",
)
# As the dashboards of vLLM 0.32 ask (examples/observability), with their variables in capitals.
QUERIES = (
    *(
        f"histogram_quantile({part}, sum by(le) (rate(vllm:{name}_seconds_bucket{{model_name='MODEL'}}[INTERVAL])))"
        for name in _TIMES
        for part in (0.99, 0.95, 0.9, 0.5)
    ),
    *(
        f"rate(vllm:{name}_seconds_sum{{model_name='MODEL'}}[INTERVAL])\n/\n"
        f"rate(vllm:{name}_seconds_count{{model_name='MODEL'}}[INTERVAL])"
        for name in _TIMES
    ),
    *(
        f"sum(increase(vllm:{n}_seconds_sum[INTERVAL])) / sum(increase(vllm:{n}_seconds_count[INTERVAL]))"
        for n in _TIMES
    ),
    *(f"sum by(le) (increase(vllm:{name}_bucket{{model_name='MODEL'}}[INTERVAL]))" for name in _BY_LENGTH),
    *(f"rate(vllm:{name}_sum{{model_name='MODEL'}}[INTERVAL])" for name in _SUMS),
    *(f"rate(vllm:{name}_tokens_total{{model_name='MODEL'}}[INTERVAL])" for name in ("prompt", "generation")),
    *(f"vllm:{name}{{model_name='MODEL'}}" for name in ("num_requests_running", "num_requests_waiting")),
    "vllm:kv_cache_usage_perc{model_name='MODEL'}",
    "sum by(finished_reason) (increase(vllm:request_success_total{model_name='MODEL'}[INTERVAL]))",
    "sum by (model_name) (rate(vllm:request_success_total{model_name=~'MODEL'}[INTERVAL]))",
    "histogram_quantile(0.90, sum by(le, model_name) (rate(vllm:request_prompt_tokens_bucket[INTERVAL])))",
    "sum(rate(vllm:prompt_tokens_total[INTERVAL]))\n/\nsum(rate(vllm:request_success_total[INTERVAL]))",
    "vllm:num_requests_running{engine='0'}",
)
_OF_STEPS = "rate(vllm:iteration_tokens_total_count[INTERVAL])"
"""Only a target counts its steps."""


async def empty(client: httpx.AsyncClient, model: str, queries: tuple[str, ...]) -> list[str]:
    asked = [query.replace("MODEL", model).replace("INTERVAL", "1m") for query in queries]
    return [query for query in asked if not await ask(client, query)]


async def served(http: httpx.AsyncClient, model: str) -> None:
    for _ in range(4):
        body = {"model": model, "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 12}
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()
        await asyncio.sleep(1.5)


async def test_every_query_of_vllms_dashboards_has_data_on_a_whole_stack(stack: Stack, tmp_path: Path) -> None:
    async with (
        prometheus(tmp_path, stack.scrape_file) as url,
        httpx.AsyncClient(base_url=url, timeout=30.0) as client,
        httpx.AsyncClient(base_url=f"http://{stack.gateway_http}", timeout=60.0) as http,
    ):
        await served(http, stack.config.model)
        assert await empty(client, stack.config.model, (*QUERIES, _OF_STEPS)) == []
        assert stack.config.model in await label_values(client, "vllm:generation_tokens_total", "model_name")


async def test_one_gateway_has_them_too_and_what_pickers_read(stack: Stack, tmp_path: Path) -> None:
    config = GatewayConfig(
        listen_grpc="127.0.0.1:0",
        listen_http="127.0.0.1:0",
        metadata_url=stack.metadata_url,
        http=HttpOptions(api_metrics=True),
    )
    async with (
        running(config) as gateway,
        httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=60.0) as http,
    ):
        (tmp_path / "targets.json").write_text(json.dumps([{"targets": [gateway.http_address]}]))
        async with (
            prometheus(tmp_path, tmp_path / "targets.json") as url,
            httpx.AsyncClient(base_url=url, timeout=30.0) as client,
        ):
            await served(http, stack.config.model)
            assert await empty(client, stack.config.model, QUERIES) == []
        page = (await http.get("/metrics")).text
    told = {sample.name: sample for family in text_string_to_metric_families(page) for sample in family.samples}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert told[f"vllm:{name}"].labels["model_name"] == stack.config.model
    shape = told["vllm:cache_config_info"].labels
    assert int(shape["block_size"]) > 0 and int(shape["num_gpu_blocks"]) == 640
    assert 0 <= told["vllm:kv_cache_usage_perc"].value <= 1
