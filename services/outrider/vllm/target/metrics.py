"""vLLM's own metrics on the ops port of a target, beside ours."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

from outrider.telemetry.vllm_names import VLLM_NAMES
from outrider.vllm.target.machine import VllmMachine

_PREFIX = "vllm:"


class VllmMetrics(Collector):
    """What vLLM's scheduler says of itself: its metrics lie in the registry of the process.

    Those that every target reports under vLLM's names are left out, for they would appear twice.
    """

    def __init__(self, config: VllmConfig, machine: VllmMachine) -> None:
        self._logger = PrometheusStatLogger(config)
        self._machine = machine
        self._taken = frozenset(VLLM_NAMES.values())

    def collect(self) -> Iterator[Metric]:
        if (stats := self._machine.scheduler_stats) is not None:
            self._machine.scheduler_stats = None
            self._logger.record(stats, None)
        for metric in REGISTRY.collect():
            if metric.name.startswith(_PREFIX) and metric.name not in self._taken:
                yield metric
