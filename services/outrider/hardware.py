"""On what a measurement was made."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """On what, and when (UTC)."""
    return {
        "cpu": _cpu("model name"),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "at": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }


def compute() -> dict[str, Any]:
    """What decides how fast this machine computes: its CPU, the cores that this process has, and its GPUs."""
    vector = sorted(flag for flag in _cpu("flags").split() if flag.startswith(("avx", "amx")))
    return {
        "cpu": _cpu("model name"),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "vector": vector,
        "gpus": sorted(_gpus()),
    }


def _gpus() -> Iterator[str]:
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        yield from (
            line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("Model")
        )


def _cpu(what: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(what)), "")
