"""Layers of a target as plain tensors, for what begins as some of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from outrider.engine import CheckpointError


def read_layers(target: Path, numbers: Sequence[int]) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The tensors of each layer, by their names in it, and the final norm. Raises CheckpointError."""
    found: dict[str, Tensor] = {}
    wanted = tuple(f"layers.{number}." for number in numbers)
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                short = name.removeprefix("model.")
                if short == "norm.weight" or short.startswith(wanted):
                    found[short] = stored.get_tensor(name)
    layers = []
    for number in numbers:
        prefix = f"layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        if not layer:
            raise CheckpointError(f"{target}", f"no tensors model.{prefix}*: only Llama-like targets are known")
        layers.append(layer)
    if "norm.weight" not in found:
        raise CheckpointError(f"{target}", "no tensor model.norm.weight: only Llama-like targets are known")
    return layers, found["norm.weight"]
