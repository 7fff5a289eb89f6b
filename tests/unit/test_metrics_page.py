"""docs/metrics.md lists what the processes tell: every metric with its labels, by whom, and no other."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
from outrider.draft.events import DraftStats
from outrider.draft.service import DraftMetrics
from outrider.gateway.generation.metrics import GatewayMetrics
from outrider.metadata.connection.timeouts import StoreCounters
from outrider.rpc.v1 import worker_pb2
from outrider.target.metrics import TargetMetrics
from outrider.target.requests.report import TargetStats
from outrider.telemetry.metrics import Handshakes, MetadataCollector, RefusedCalls
from outrider.telemetry.ops import Ops
from outrider.telemetry.vllm_names import VLLM_NAMES
from outrider.worker.gpus import NO_GPUS, GpuCollector
from outrider_controller.autoscaler.planner import Planner
from outrider_controller.control.alerts.report import AlertMetrics
from outrider_controller.control.plan.demand import Demand, TenantMetrics
from outrider_controller.router.observe.telemetry import RouterTelemetry
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
INFO = worker_pb2.WorkerInfo(model="m")


class NoEvents:
    async def emit(self, kind: str, fields: Mapping[str, str | int | float | bool]) -> None: ...


def store(registry: CollectorRegistry) -> None:
    MetadataCollector(registry, lambda: True, lambda: asdict(StoreCounters()))


def plan(registry: CollectorRegistry) -> None:
    TenantMetrics(registry, Planner)


def gpus(prefix: str) -> Callable[[CollectorRegistry], object]:
    return lambda registry: GpuCollector(registry, NO_GPUS, prefix)


def port(registry: CollectorRegistry) -> None:
    RefusedCalls(registry, [])
    Handshakes(registry)


PROCESSES: dict[str, tuple[Callable[[CollectorRegistry], object], ...]] = {
    "gateway": (GatewayMetrics, store, port),
    "router": (lambda registry: RouterTelemetry(registry, NoEvents()), store, port),
    "control": (Demand, store, port, lambda registry: AlertMetrics(registry, list), plan),
    "target": (lambda registry: TargetMetrics(registry, INFO, TargetStats(), "native"), store, port, gpus("outrider_")),
    "draft": (lambda registry: DraftMetrics(registry, INFO, DraftStats()), store, port, gpus("outrider_draft_")),
}


def registry_of(process: str) -> CollectorRegistry:
    """Of a process that has just started."""
    registry = Ops(process, None).registry
    for make in PROCESSES[process]:
        make(registry)
    return registry


def exported(process: str) -> list[tuple[Metric, list[str]]]:
    """What a process tells of itself, with labels."""
    registry = registry_of(process)
    found = []
    for collector in list(registry._collector_to_names):
        declared = list(getattr(collector, "_labelnames", ()))
        for metric in collector.collect():
            of_samples = {label for sample in metric.samples for label in sample.labels}
            # A family of our own knows its labels, though it has no sample yet.
            own = getattr(metric, "_labelnames", ())
            found.append((metric, sorted({*declared, *own, *of_samples} - {"le"})))
    return [(metric, labels) for metric, labels in found if metric.name.startswith("outrider_")]


def rows() -> list[str]:
    """The lines of the page's table."""
    by_name: dict[str, tuple[Metric, list[str], list[str]]] = {}
    for process in PROCESSES:
        for metric, labels in exported(process):
            by_name.setdefault(metric.name, (metric, labels, []))[2].append(process)
    return [_row(metric, labels, by) for _, (metric, labels, by) in sorted(by_name.items())]


def _row(metric: Metric, labels: list[str], processes: list[str]) -> str:
    suffix = "_total" if metric.type == "counter" else ""
    theirs = ", ".join(f"`{name}{suffix}`" for name in VLLM_NAMES.get(metric.name, ()))
    by = "all" if {*PROCESSES} == {*processes} else ", ".join(processes)
    named = ", ".join(f"`{label}`" for label in labels)
    return f"| `{metric.name}{suffix}` | {metric.type} | {named} | {by} | {metric.documentation} | {theirs} |"


def test_the_page_lists_every_metric_and_no_other() -> None:
    listed = [line for line in PAGE.read_text().splitlines() if line.startswith("| `outrider_")]
    assert listed == rows(), "docs/metrics.md should say:\n" + "\n".join(rows())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
@pytest.mark.parametrize("process", PROCESSES)
def test_promtool_finds_nothing_wrong_with_what_a_process_tells(process: str) -> None:
    told = generate_latest(registry_of(process))
    done = subprocess.run(["promtool", "check", "metrics"], input=told, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_but_those_of_all_processes_is_told_by_one_kind() -> None:
    for row in rows():
        process = row.split(" | ")[3]
        assert process == "all" or "," not in process


def test_every_name_of_vllms_stands_for_a_metric_of_ours() -> None:
    ours = {metric.name for process in PROCESSES for metric, _ in exported(process)}
    assert set(VLLM_NAMES) <= ours
