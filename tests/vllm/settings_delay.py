"""python -m tests.vllm.settings_delay: how soon does an operator's word hold in `vllm serve` with the plugin?

In vLLM's environment: a router, a control plane and a draft worker; with `--own` vLLM drafts itself. Four tenants have
an answer under way in one batch. One is off, one has a cap, one has what the plan says; the fourth is turned off, then
has a cap, then what the plan says, in each trial. Printed are the seconds and the steps until its first step that
obeys, and what the others had at most. Scheduled asynchronously, two steps are under way when the word comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from outrider.rpc.v1 import control_pb2, tenants_pb2
from outrider_controller.cli.clusters.control import call_control
from outrider_controller.cli.exits import CommandError

from tests.vllm import step_log
from tests.vllm.cluster import Cluster, answering, clustered
from tests.vllm.models import checkpoint
from tests.vllm.step_log import Step, steps
from tests.vllm.vllm_serve import plugin, serving, until

CAP = 2
WORDS: dict[str, dict[str, Any]] = {
    "off": {"setting": tenants_pb2.SPECULATION_SETTING_OFF},
    "capped": {"setting": tenants_pb2.SPECULATION_SETTING_ON, "max_draft_tokens": CAP},
    "auto": {"setting": tenants_pb2.SPECULATION_SETTING_AUTO},
}
_CHANGED = "changed"
_HELD_STEPS = 30
_PATIENCE_S = 30.0
"""The plan may find that no more than the cap pays."""


def say(cluster: Cluster, tenant: str, word: str) -> float:
    """When it was said. On a busy machine the control plane may ask to say it again."""
    request = control_pb2.SetSpeculationRequest(tenant=tenant, **WORDS[word])

    def taken() -> float:
        said_s = time.monotonic()
        try:
            asyncio.run(call_control(cluster.control_address, lambda stub: stub.SetSpeculation(request)))
        except CommandError:
            return 0.0
        return said_s

    return float(until(taken))


def obeyed(found: list[Step], word: str) -> int | None:
    """Which of these steps is the first that obeys, as all after it do; None while too few have."""
    counts = [one.num_drafted for one in found]
    if word == "auto":
        return next((at for at, count in enumerate(counts) if count > CAP), None)
    most = CAP if word == "capped" else 0
    held = len(list(takewhile(lambda count: count <= most, reversed(counts))))
    first = next((at for at in range(len(counts) - held, len(counts)) if counts[at] or not most), None)
    return first if held >= _HELD_STEPS else None


def delay(cluster: Cluster, path: Path, word: str) -> tuple[float, int] | None:
    """Seconds and steps from the word to the first step that obeys. None: the plan does not say more than the cap."""
    said_s = say(cluster, _CHANGED, word)

    def settled() -> tuple[float, int] | bool | None:
        found = [one for one in steps(path) if one.tenant == _CHANGED and one.began_s > said_s]
        if (first := obeyed(found, word)) is not None:
            return found[first].began_s - said_s, first
        return word == "auto" and time.monotonic() > said_s + _PATIENCE_S

    answer = until(settled)
    return None if answer is True else answer


def report(word: str, delays: list[tuple[float, int] | None]) -> None:
    known = [one for one in delays if one is not None]
    click.echo(f"{word}: {len(known)} of {len(delays)} changes")
    for unit, took in zip(("s", "steps"), zip(*known, strict=True), strict=False):
        click.echo(f"  {statistics.median(took):.2f} {unit} in the median, {max(took):.2f} at most")


@click.command()
@click.option("--trials", type=click.IntRange(1), default=20, show_default=True)
@click.option("--model", default="tiny", show_default=True, help="Of vLLM, and of the draft worker.")
@click.option("--own", is_flag=True, help="vLLM drafts with the model, and there is no draft worker.")
def main(trials: int, model: str, own: bool) -> None:
    delays: defaultdict[str, list[tuple[float, int] | None]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ[step_log.PATH] = str(path := directory / "steps")
        path.touch()
        served = checkpoint(model, directory, max_context_len=1024)
        cluster = stack.enter_context(clustered(directory, None if own else served))
        config = {"routers": [cluster.router_address], "row_price": 0, "tenant_header": "x-tenant"}
        logging = "--scheduler-cls", f"{step_log.__name__}.{step_log.Scheduler.__name__}"
        server = stack.enter_context(serving(served, *plugin(served if own else None, **config), *logging))
        for word in WORDS:
            say(cluster, word, word)
        for tenant in (*WORDS, _CHANGED):
            stack.enter_context(answering(server, tenant))
        until(lambda: any(one.tenant == "capped" and one.num_drafted for one in steps(path)))
        since = len(steps(path))
        for _ in range(trials):
            for word in WORDS:
                delays[word].append(delay(cluster, path, word))
        found = steps(path)[since:]
    for word in WORDS:
        report(word, delays[word])
    sizes = Counter(Counter(one.began_s for one in found).values())
    click.echo(f"{sizes[len(WORDS) + 1]} of {sizes.total()} steps with all four tenants; at most of one that stays")
    for word in WORDS:
        click.echo(f"  {word}: {max((one.num_drafted for one in found if one.tenant == word), default=0)} drafted")


if __name__ == "__main__":
    main()
