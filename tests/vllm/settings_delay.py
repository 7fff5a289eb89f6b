"""python -m tests.vllm.settings_delay: how soon does an operator's word hold in `vllm serve` with the plugin?

In vLLM's environment, with a real model: one answer after another, a draft worker, a router and a control plane. The
tenant is put on and off: how long until vLLM has verified the last drafted token? With `--own` vLLM drafts itself.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import click
from outrider.engine import resolve
from outrider.rpc.v1 import control_pb2, tenants_pb2
from outrider_controller.cli.clusters.control import call_control

from tests.vllm.cluster import Cluster, answering, clustered
from tests.vllm.vllm_serve import Server, plugin, serving, until

ON, OFF = tenants_pb2.SPECULATION_SETTING_ON, tenants_pb2.SPECULATION_SETTING_OFF
_TENANT = "live"
_QUIET_TOKENS = 60


def say(cluster: Cluster, setting: tenants_pb2.SpeculationSetting.ValueType) -> None:
    request = control_pb2.SetSpeculationRequest(tenant=_TENANT, setting=setting)
    asyncio.run(call_control(cluster.control_address, lambda stub: stub.SetSpeculation(request)))


def seconds_until_plain(server: Server, cluster: Cluster) -> float:
    say(cluster, ON)
    until(lambda: server.verified(20).drafted)
    said_s = last_s = time.monotonic()
    say(cluster, OFF)
    drafted, tokens = 0.0, 0.0
    while (now := server.counters())["generation_tokens"] < tokens + _QUIET_TOKENS or not tokens:
        if now["spec_decode_num_draft_tokens"] > drafted:
            last_s, drafted, tokens = time.monotonic(), now["spec_decode_num_draft_tokens"], now["generation_tokens"]
        time.sleep(0.01)
    return last_s - said_s


@click.command()
@click.option("--trials", type=click.IntRange(1), default=20, show_default=True)
@click.option("--model", default="smollm2-135m-instruct", show_default=True, help="Of vLLM, and of the draft worker.")
@click.option("--own", is_flag=True, help="vLLM drafts with the model, and there is no draft worker.")
def main(trials: int, model: str, own: bool) -> None:
    path = resolve(model)
    with tempfile.TemporaryDirectory() as directory, clustered(Path(directory), None if own else path) as cluster:
        config = {"routers": [cluster.router_address], "row_price": 0, "tenant_header": "x-tenant"}
        with serving(path, *plugin(path if own else None, **config)) as server, answering(server, _TENANT):
            took = [seconds_until_plain(server, cluster) for _ in range(trials)]
    click.echo(
        f"last drafted token after the operator's word: {statistics.median(took):.2f} s in the median, "
        f"{max(took):.2f} s at most, {trials} times"
    )


if __name__ == "__main__":
    main()
