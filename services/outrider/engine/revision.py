"""Revisions: two engines of one revision continue a text with the same tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.engine.checkpoints.checkpoints import weights_revision
from outrider.engine.engine import ModelInfo


def revision(path: Path, info: ModelInfo, quantization: str = "none") -> str:
    """WEIGHTS/ARITHMETIC, as WorkerInfo.model_revision says."""
    return f"{weights_revision(path, quantization)}/{arithmetic(info)}"


def arithmetic(info: ModelInfo) -> str:
    """dtype, the execution, and all that decides its rounding: CPU instructions, or the GPU."""
    parts = [info.dtype, info.execution]
    if torch.device(info.device).type == "cuda":
        parts.append(torch.cuda.get_device_name(torch.device(info.device)).replace(" ", "-"))
    elif not info.execution.startswith("native"):
        # The execution of our kernels names their instructions; torch uses those that the CPU has.
        parts.append(f"torch-{torch.backends.cpu.get_cpu_capability().lower()}")
    return "-".join(parts)
