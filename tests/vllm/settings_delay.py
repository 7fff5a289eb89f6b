"""python -m tests.vllm.settings_delay: how soon does an operator's word hold in `vllm serve` with the plugin?

In vLLM's environment: one answer after another, a draft worker, a router and a control plane. The tenant is put on and
off: how long until vLLM has verified the last drafted token, and in how many steps? Scheduled asynchronously, two are
under way when the word comes. The tiny model's steps are short, and the rest is ours. With `--own` vLLM drafts itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import click
from outrider.rpc.v1 import control_pb2, tenants_pb2
from outrider_controller.cli.clusters.control import call_control

from tests.vllm.cluster import Cluster, answering, clustered
from tests.vllm.models import checkpoint
from tests.vllm.vllm_serve import Server, plugin, serving, until

ON, OFF = tenants_pb2.SPECULATION_SETTING_ON, tenants_pb2.SPECULATION_SETTING_OFF
_TENANT = "live"
_QUIET_TOKENS = 60


def say(cluster: Cluster, setting: tenants_pb2.SpeculationSetting.ValueType) -> None:
    request = control_pb2.SetSpeculationRequest(tenant=_TENANT, setting=setting)
    asyncio.run(call_control(cluster.control_address, lambda stub: stub.SetSpeculation(request)))


def until_plain(server: Server, cluster: Cluster) -> tuple[float, float]:
    """Seconds and steps with drafts from the word on."""
    say(cluster, ON)
    until(lambda: server.verified(20).drafted)
    said, said_s = server.counters(), time.monotonic()
    say(cluster, OFF)
    last, last_s = said, said_s
    while (now := server.counters())["generation_tokens"] < last["generation_tokens"] + _QUIET_TOKENS:
        if now["spec_decode_num_drafts"] > last["spec_decode_num_drafts"]:
            last, last_s = now, time.monotonic()
        time.sleep(0.01)
    return last_s - said_s, last["spec_decode_num_drafts"] - said["spec_decode_num_drafts"]


@click.command()
@click.option("--trials", type=click.IntRange(1), default=20, show_default=True)
@click.option("--model", default="tiny", show_default=True, help="Of vLLM, and of the draft worker.")
@click.option("--own", is_flag=True, help="vLLM drafts with the model, and there is no draft worker.")
def main(trials: int, model: str, own: bool) -> None:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = checkpoint(model, directory, max_context_len=1024)
        cluster = stack.enter_context(clustered(directory, None if own else path))
        config = {"routers": [cluster.router_address], "row_price": 0, "tenant_header": "x-tenant"}
        with serving(path, *plugin(path if own else None, **config)) as server, answering(server, _TENANT):
            seconds, steps = zip(*(until_plain(server, cluster) for _ in range(trials)), strict=True)
    for unit, took in (("s", seconds), ("steps with drafts", steps)):
        click.echo(f"after the word: {statistics.median(took):.2f} {unit} in the median, {max(took):.2f} at most")


if __name__ == "__main__":
    main()
