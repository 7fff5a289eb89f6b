"""GPU telemetry, against an NVML that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from outrider.rpc.v1 import control_pb2, worker_pb2
from outrider.worker.gpus import NO_GPUS, GpuCollector, Gpus, uuids_of
from outrider_controller.control.api.rows import worker_row
from prometheus_client import CollectorRegistry

GIB = 1 << 30


class FakeNvml:
    """Two H100s, of which the second does not tell its power."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.num_reads = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in ("GPU-a", "GPU-b"):
            raise self.NVMLError("not found")
        return "ab".index(uuid[-1])

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.num_reads += 1
        return SimpleNamespace(total=80 * GIB, used=(60 + handle) * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=(80, 40)[handle])

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("not supported")
        return 512_500


def test_a_worker_says_what_its_gpus_are_and_how_they_fare() -> None:
    gpus = Gpus.open(["GPU-a", "GPU-b"], FakeNvml())
    info, load = worker_pb2.WorkerInfo(worker_id="t", device="cuda:0"), worker_pb2.WorkerLoad(num_running=3)
    gpus.describe(info)
    gpus.report(load)
    assert (info.device_name, info.device_memory_bytes) == ("NVIDIA H100 80GB HBM3", 160 * GIB)
    assert (load.num_running, load.gpu.memory_used_bytes, load.gpu.power_watts) == (3, 121 * GIB, 512.5)
    assert load.gpu.utilization == pytest.approx(0.6)
    row = worker_row(control_pb2.WorkerStatus(info=info, load=load))
    assert row["device_name"] == info.device_name
    said = {name: value for name, value in row.items() if name.startswith("gpu_")}
    assert said == {"gpu_memory_gib": 160, "gpu_used_gib": 121, "gpu_utilization": 0.6, "gpu_power_watts": 512.5}


def test_metrics_are_told_by_device_and_a_close_reading_is_shared() -> None:
    nvml, registry, now_s = FakeNvml(), CollectorRegistry(), [0.0]
    gpus = Gpus(nvml, [0, 1], clock=lambda: now_s[0])
    GpuCollector(registry, gpus, "outrider_")
    labels = {"gpu": "1", "device_name": "NVIDIA H100 80GB HBM3"}
    assert registry.get_sample_value("outrider_gpu_memory_used_bytes", labels) == 61 * GIB
    assert registry.get_sample_value("outrider_gpu_utilization_ratio", labels) == 0.4
    assert registry.get_sample_value("outrider_gpu_power_watts", labels) == 0
    # One for each of the two.
    assert nvml.num_reads == 2
    now_s[0] = 1.0
    gpus.read()
    assert nvml.num_reads == 4


@pytest.mark.parametrize("uuids", [[], ["GPU-unknown"]])
def test_without_gpus_nothing_is_said(uuids: list[str]) -> None:
    gpus, registry = Gpus.open(uuids, FakeNvml()), CollectorRegistry()
    assert gpus is NO_GPUS
    info, load = worker_pb2.WorkerInfo(worker_id="t"), worker_pb2.WorkerLoad(num_running=3)
    gpus.describe(info)
    assert gpus.report(load) == worker_pb2.WorkerLoad(num_running=3)
    assert info == worker_pb2.WorkerInfo(worker_id="t")
    GpuCollector(registry, gpus, "outrider_")
    assert all(not metric.samples for metric in registry.collect())
    row = worker_row(control_pb2.WorkerStatus(info=info, load=load))
    assert row["device_name"] == "" and row["gpu_used_gib"] is None


def test_a_worker_on_a_cpu_asks_for_no_device() -> None:
    assert uuids_of(["cpu"]) == []
