"""Quantized checkpoints of the field, AWQ, GPTQ and compressed-tensors, as plain weights. Reads files; makes no model.

What a layer packs into several tensors becomes its `weight`, once, while the checkpoint is loaded. Rows of int8 with a
scale each stay as they are on a CPU, where our kernels multiply them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.engine.checkpoints.checkpoints import CheckpointError

log = logging.getLogger(__name__)

Parts = Mapping[str, Tensor]
"""The tensors of one layer, by the end of their name."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of eight outputs in a word, where each lies: AutoAWQ's kernels interleave them."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A checkpoint's tensors."""

    state: dict[str, Tensor]
    """By name, in the dtype that the engine wants."""
    int8: dict[str, tuple[Tensor, Tensor]]
    """int8 rows and a scale for each, by the name of their layer; empty unless all layers are such."""


def read(path: Path, scheme: Mapping[str, Any], dtype: torch.dtype, *, keep_int8: bool) -> Plain:
    """All tensors of a checkpoint without `engine_fault`. Raises CheckpointError that names a tensor."""
    state: dict[str, Tensor] = {}
    int8: dict[str, tuple[Tensor, Tensor]] = {}
    unpack = _READERS[scheme["quant_method"]]
    for layer, parts in _layers(path):
        if not _PACKED & parts.keys():
            state.update((f"{layer}.{end}", tensor) for end, tensor in parts.items())
            continue
        try:
            state[f"{layer}.weight"] = unpack(parts, scheme).to(dtype)
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(str(path), f"{layer}: its packed weights do not fit one another: {error}") from error
        if "bias" in parts:
            state[f"{layer}.bias"] = parts["bias"]
        if _is_int8_rows(parts):
            int8[layer] = parts["weight"], parts["weight_scale"].view(-1)
    # Layers whose inputs are the same are joined by the kernels: all of them are int8, or none.
    others = {name for name, _ in _layers_of(state) if name.endswith("_proj")} - int8.keys()
    kept = int8 if keep_int8 and not others else {}
    widened = f"widened to {str(dtype).removeprefix('torch.')}, and take the memory and time of plain weights"
    log.info("weights in %s are %s", scheme["quant_method"], "kept in int8" if kept else widened)
    return Plain(state, kept)


_PACKED = {"qweight", "weight_packed", "weight_scale"}
"""Parts that only packed layers have."""


def _is_int8_rows(parts: Parts) -> bool:
    weight, scale = parts.get("weight"), parts.get("weight_scale")
    if weight is None or scale is None or "weight_zero_point" in parts:
        return False
    return weight.dtype == torch.int8 and scale.numel() == len(weight)


def _layers(path: Path) -> Iterator[tuple[str, Parts]]:
    """Each layer's tensors, wherever its files have them."""
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                layer, _, end = name.rpartition(".")
                found.setdefault(layer, {})[end] = file
    for layer, ends in found.items():
        yield layer, {end: _tensor(file, f"{layer}.{end}") for end, file in ends.items()}


def _layers_of(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name.removesuffix(".weight"), tensor) for name, tensor in state.items() if name.endswith(".weight"))


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        found: Tensor = tensors.get_tensor(name)
    return found


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Words of 32 bits → their numbers, from the lowest bits on, next to one another along `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _gptq(parts: Parts, scheme: Mapping[str, Any]) -> Tensor:
    """[outputs, inputs]; packed along the inputs, each of which names its group."""
    bits = scheme["bits"]
    numbers, scales = _unpacked(parts["qweight"], bits, 0), parts["scales"].float()
    zeros = _unpacked(parts["qzeros"], bits, 1)[:, : scales.shape[1]]
    if scheme.get("checkpoint_format", "gptq") == "gptq":
        # The first version of the format stores one less.
        zeros = zeros + 1
    inputs = len(numbers)
    group = parts["g_idx"].long() if "g_idx" in parts else torch.arange(inputs) // -(-inputs // len(scales))
    return ((numbers - zeros[group]) * scales[group]).T.contiguous()


def _awq(parts: Parts, scheme: Mapping[str, Any]) -> Tensor:
    """[outputs, inputs]; packed along the outputs."""
    numbers, zeros = (_ordered(_unpacked(parts[name], 4, 1)) for name in ("qweight", "qzeros"))
    scales = parts["scales"].float()
    group = torch.arange(len(numbers)) // -(-len(numbers) // len(scales))
    return ((numbers - zeros[group]) * scales[group]).T.contiguous()


def _ordered(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, 8)[..., list(_AWQ_ORDER)].reshape(numbers.shape)


def _compressed(parts: Parts, scheme: Mapping[str, Any]) -> Tensor:
    """[outputs, inputs]"""
    if "weight_packed" not in parts:
        weight, zeros = parts["weight"], parts.get("weight_zero_point")
    else:
        outputs, inputs = parts["weight_shape"].tolist()
        bits = 32 // -(-inputs // parts["weight_packed"].shape[1])
        half = 1 << bits - 1
        weight = _unpacked(parts["weight_packed"], bits, 1)[:, :inputs] - half
        zeros = parts.get("weight_zero_point")
        zeros = None if zeros is None else _unpacked(zeros, bits, 0)[:outputs] - half
    numbers = weight.float()
    if zeros is not None:
        numbers = numbers - _spread(zeros.float(), parts, numbers)
    return numbers * _spread(parts["weight_scale"].float(), parts, numbers)


def _spread(values: Tensor, parts: Parts, like: Tensor) -> Tensor:
    """A value for each weight: of the tensor, of rows, of groups of a row, or of blocks."""
    if values.ndim < 2:
        values = values.view(-1, 1)
    rows, columns = (-(-size // count) for size, count in zip(like.shape, values.shape, strict=True))
    of_row = values.repeat_interleave(rows, 0)[: len(like)]
    if "weight_g_idx" in parts:
        return of_row[:, parts["weight_g_idx"].long()]
    return of_row.repeat_interleave(columns, 1)[:, : like.shape[1]]


_READERS: dict[str, Callable[[Parts, Mapping[str, Any]], Tensor]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}
