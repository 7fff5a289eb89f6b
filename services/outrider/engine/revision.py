"""What pins a text: two engines of one revision continue it with the same tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.engine.checkpoints import weights_revision
from outrider.engine.engine import ModelInfo


def revision(path: Path, info: ModelInfo, quantization: str = "none", *, shards: int = 1) -> str:
    """WEIGHTS/ARITHMETIC, as WorkerInfo.model_revision says. shards: ranks that divide the model."""
    return f"{weights_revision(path, quantization)}/{arithmetic(info, shards)}"


def arithmetic(info: ModelInfo, shards: int = 1) -> str:
    """dtype, what computes a step, and what decides how that rounds: instructions, GPU, how sums are divided."""
    parts = [info.dtype, info.execution]
    if torch.device(info.device).type == "cuda":
        parts.append(torch.cuda.get_device_name(torch.device(info.device)).replace(" ", "-"))
    elif not info.execution.startswith("native"):
        # Our kernels name theirs; torch takes what the CPU has.
        parts.append(f"torch-{torch.backends.cpu.get_cpu_capability().lower()}")
    if shards > 1:
        parts.append(f"tp{shards}")
    return "-".join(parts)
