"""Prometheus counters whose values the worker keeps itself and that are read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

CounterRow = tuple[str, str, float | Mapping[str, float]]
"""A counter's name without `outrider_`, its meaning, and its value, or its values by `source`."""


class CounterCollector(Collector):
    """Counters of one model's worker."""

    def __init__(self, model_name: str, read: Callable[[], Iterable[CounterRow]]) -> None:
        self._model_name = model_name
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, meaning, value in self._read():
            source = ["source"] if isinstance(value, Mapping) else []
            family = CounterMetricFamily(f"outrider_{name}", meaning, labels=["model_name", *source])
            # A copy: the step thread may add a source meanwhile.
            values = {(key,): n for key, n in dict(value).items()} if isinstance(value, Mapping) else {(): value}
            for labels, count in values.items():
                family.add_metric([self._model_name, *labels], count)
            yield family
