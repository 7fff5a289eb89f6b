"""On what a measurement was made."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """On what, and when (UTC)."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "at": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
