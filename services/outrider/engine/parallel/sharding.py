"""Requirements of a model that runs on several processes, and the arguments with which transformers shards it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from outrider.engine.checkpoints import CheckpointError, read_config


def check_divides(path: Path, settings: Any, size: int) -> None:
    """Every rank must hold whole heads, and equally many. Raises CheckpointError."""
    if "outrider_draft" in read_config(path):
        raise CheckpointError("tensor_parallel", f"{path} is a draft, which is not divided")
    heads = settings.num_attention_heads
    found = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(settings, "num_key_value_heads", None) or heads,
    }
    for name, count in found.items():
        if count % size:
            message = f"{count} {name} of {path}/config.json cannot be divided by {size}"
            raise CheckpointError("tensor_parallel", message)


def check_device(device: str, size: int) -> None:
    """Each rank needs a GPU. Raises CheckpointError."""
    if torch.device(device).type == "cuda" and (count := torch.cuda.device_count()) < size:
        raise CheckpointError("tensor_parallel", f"{size} GPUs are needed, one a rank; this machine has {count}")


def check_execution(execution: str) -> None:
    """Sharded layers communicate with other ranks, which only transformers' own layers do. Raises CheckpointError."""
    if execution not in ("auto", "transformers"):
        raise CheckpointError("execution", f"{execution} does not divide a model; tensor_parallel needs transformers")


def rank_device(device: str, rank: int) -> str:
    """cuda:RANK for cuda, the same for all else."""
    kind = torch.device(device).type
    return f"cuda:{rank}" if kind == "cuda" else device


def sharding_arguments(size: int) -> dict[str, Any]:
    """For from_pretrained: split the model by its own plan over the process group."""
    from transformers.distributed import DistributedConfig

    if "tp_size" in {field.name for field in fields(DistributedConfig)}:
        return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}
    # Before transformers 5.13 or so, the plan is an argument of its own.
    return {"tp_plan": "auto", "tp_size": size}
