"""The GPUs of a worker and their load, read with NVML (`nvidia-ml-py`, extra `gpu`).

Empty on CPUs, without the library, or without a driver. A value that a device does not report is 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.rpc.v1 import worker_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_AGE_S = 0.5
"""Leases and scrapes within this time share a reading."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    index: int
    """Index among this worker's devices."""
    name: str
    memory_bytes: int
    used_bytes: int
    """Memory used by all processes."""
    utilization: float
    """Recent share of time in which a kernel ran, 0 to 1."""
    power_watts: float


class Gpus:
    """The devices of one worker. May be read from any thread."""

    def __init__(self, nvml: Any, handles: Sequence[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._handles = handles
        self._clock = clock
        self._readings: list[GpuReading] = []
        self._read_s = float("-inf")

    @classmethod
    def open(cls, uuids: Sequence[str], module: Any = None) -> Gpus:
        """The devices with these UUIDs. `module`: pynvml, if not given."""
        if not uuids:
            return NO_GPUS
        try:
            nvml = module if module is not None else import_module("pynvml")
            nvml.nvmlInit()
            return cls(nvml, [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids])
        except Exception as error:  # no library, no driver, no such device: each in several ways
            log.info("GPUs tell nothing of themselves: %s: %s", type(error).__name__, error)
            return NO_GPUS

    def read(self) -> list[GpuReading]:
        """One per device, in the order of indices."""
        if self._clock() - self._read_s > _MAX_AGE_S:
            self._readings = [self._reading(index, handle) for index, handle in enumerate(self._handles)]
            self._read_s = self._clock()
        return self._readings

    def describe(self, info: worker_pb2.WorkerInfo) -> None:
        """Fills in the fields about devices."""
        if readings := self.read():
            info.device_name = readings[0].name
            info.device_memory_bytes = sum(one.memory_bytes for one in readings)

    def report(self, load: worker_pb2.WorkerLoad) -> worker_pb2.WorkerLoad:
        """Adds the devices' readings to `load`, and returns it."""
        if readings := self.read():
            load.gpu.memory_used_bytes = sum(one.used_bytes for one in readings)
            load.gpu.utilization = sum(one.utilization for one in readings) / len(readings)
            load.gpu.power_watts = sum(one.power_watts for one in readings)
        return load

    def _reading(self, index: int, handle: Any) -> GpuReading:
        nvml = self._nvml
        name = self._asked(lambda: nvml.nvmlDeviceGetName(handle), "")
        used, memory = self._asked(lambda: _memory(nvml.nvmlDeviceGetMemoryInfo(handle)), (0, 0))
        return GpuReading(
            index=index,
            name=name,
            memory_bytes=memory,
            used_bytes=used,
            utilization=self._asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, 0.0),
            power_watts=self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 0.0),
        )

    def _asked(self, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except self._nvml.NVMLError:
            return otherwise


def _memory(info: Any) -> tuple[int, int]:
    return int(info.used), int(info.total)


NO_GPUS = Gpus(None, ())


def uuids_of(devices: Sequence[str]) -> list[str]:
    """UUIDs of torch devices, as NVML writes them; none for CPUs."""
    import torch

    cuda = [name for name in devices if name.startswith("cuda")]
    return [f"GPU-{torch.cuda.get_device_properties(torch.device(name)).uuid}" for name in cuda]


def metric_prefix(role: worker_pb2.WorkerRole.ValueType) -> str:
    """A draft's metrics have names of their own, so that a sum over all workers counts nothing twice."""
    return "outrider_draft_" if role == worker_pb2.WORKER_ROLE_DRAFT else "outrider_"


class GpuCollector(Collector):
    """Reads the devices when scraped. A family without devices has no sample."""

    def __init__(self, registry: CollectorRegistry, gpus: Gpus, prefix: str) -> None:
        """`prefix`: of the metric names, by the kind of worker."""
        self._gpus = gpus
        self._prefix = prefix
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, tuple[str, Callable[[GpuReading], float]]] = {
            "gpu_memory_bytes": ("Memory of the worker's GPUs.", lambda one: one.memory_bytes),
            "gpu_memory_used_bytes": (
                "Memory of the worker's GPUs in use, by any process.",
                lambda one: one.used_bytes,
            ),
            "gpu_power_watts": ("Power that the GPU draws.", lambda one: one.power_watts),
            "gpu_utilization_ratio": ("Share of the time in which a kernel ran, 0 to 1.", lambda one: one.utilization),
        }
        readings = self._gpus.read()
        for name, (meaning, value) in families.items():
            family = GaugeMetricFamily(f"{self._prefix}{name}", meaning, labels=["gpu", "device_name"])
            for one in readings:
                family.add_metric([str(one.index), one.name], value(one))
            yield family
