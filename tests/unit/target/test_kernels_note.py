"""A target that runs without our kernels says so where operators look."""

from __future__ import annotations

from dataclasses import replace

from outrider.engine import ModelInfo
from outrider.rpc.v1 import worker_pb2
from outrider.target.metrics import TargetMetrics
from outrider.target.process import _notes
from outrider.target.requests.report import TargetStats
from prometheus_client import CollectorRegistry

INFO = ModelInfo(384, 512, 16, 8, "float32", "cpu", "fused", (2,))


def test_missing_kernels_are_a_note_and_a_gauge() -> None:
    for execution, device, native in (("fused", "cpu", 0), ("native-avx2", "cpu", 1), ("fused-cuda", "cuda", 0)):
        registry = CollectorRegistry()
        TargetMetrics(registry, worker_pb2.WorkerInfo(model="m"), TargetStats(), execution)
        labels = {"model_name": "m", "execution": execution}
        assert registry.get_sample_value("outrider_native_kernels", labels) == native
        noted = bool(_notes(replace(INFO, execution=execution, device=device)))
        assert noted is (device == "cpu" and not native)
